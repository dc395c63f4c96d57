"""Models of the hub by name, both ways: Hugging Face's own client, against a hub on loopback."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mingpt.cli import cli
from mingpt.config.checks import missing_places
from mingpt.data.bpe import read_tokenizer
from mingpt.data.template import Template, read_template
from mingpt.data.vocabulary import Numbers
from mingpt.errors import TransientError, UserError
from mingpt.files import hub as client
from mingpt.prepare.extras import extras
from mingpt.snapshot.reader import read_manifest
from mingpt.snapshot.store import Store
from mingpt.train.attempt import attempt
from mingpt.weights.fitting import form_of
from mingpt.weights.reading import Weights, read_weights
from mingpt.world.lifetime import Lifetime
from tests.kits import hub_kit
from tests.kits.config_kit import configured
from tests.kits.hub_kit import CONSTANTS, Hub, Repository
from tests.kits.prepare_kit import files
from tests.kits.replay_kit import train_here
from tests.kits.told import Told
from tests.kits.weights_kit import WORDS, ours, saved

TOKEN = "a-token-that-nobody-may-see"
NAME = "me/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with hub_kit.hub(tmp_path / "hf") as started:
        yield started


@pytest.fixture
def model(tmp_path: Path, hub: Hub) -> Path:
    """A folder with weights, and the same on the hub, with what else models have there."""
    saved(tmp_path / "here")
    hub.repositories[NAME] = repository = Repository()
    others = {"pytorch_model.bin": b"a pickle", "onnx/model.safetensors": b"another", "consolidated.safetensors": b""}
    repository.commit(files(tmp_path / "here") | others)
    return tmp_path / "here"


def weights(url: object) -> Weights:
    return read_weights(str(url), form_of(ours()), Numbers(WORDS))


def digest_at(run: str, step: int) -> str:
    return read_manifest(Store(f"{run}/snapshots"), step).digest


def test_a_name_is_the_folder_of_the_hub(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = weights(model).sha256
    assert [weights(url).sha256 for url in (NAME, f"hf://{NAME}@main")] == [wanted] * 2
    assert sorted(path.rpartition("/")[2] for path in hub.read) == ["config.json", "model.safetensors"]
    monkeypatch.setattr(f"{CONSTANTS}.HF_HUB_OFFLINE", True)
    assert weights(NAME).sha256 == wanted  # what is in the cache needs no hub


def test_a_folder_of_that_name_wins_and_one_of_its_owner_is_a_place_here(hub: Hub, model: Path) -> None:
    saved(Path(NAME), n_layer=1)
    with pytest.raises(UserError, match=r"n_layer"):
        weights(NAME)
    shutil.rmtree(NAME)
    with pytest.raises(UserError, match=rf"^model\.init_from={NAME}: there is no config\.json"):
        weights(NAME)
    assert hub.read == []
    assert weights(f"hf://{NAME}").sha256 == weights(model).sha256


@pytest.mark.parametrize("how", ["missing", "no revision", "gated", "offline", "no name", "no client"])
@pytest.mark.usefixtures("model")
def test_what_cannot_be_had_is_a_clear_mistake(hub: Hub, how: str, monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    url = {"missing": "me/modle", "no revision": f"{NAME}@nowhere", "no name": "me/mo--del"}.get(how, NAME)
    hub.repositories[NAME].gated = how == "gated"
    if how == "offline":
        monkeypatch.setattr(f"{CONSTANTS}.HF_HUB_OFFLINE", True)
    if how == "no client":
        client.set_up.cache_clear()
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with told.mistake():
        weights(url)


def test_a_hub_that_cannot_be_reached_is_no_mistake(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{CONSTANTS}.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TransientError, match=rf"^model\.init_from={NAME}: "):
        weights(NAME)


def test_a_vocabulary_and_a_template_are_had_by_name(hub: Hub) -> None:
    hub.repositories[NAME] = Repository()
    tokenizer = '{"model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}}'
    fields = {"chat_template": "\n{{ bos_token }}{{ messages }}", "bos_token": '"<s>', "eos_token": "</s>"}
    files = {"tokenizer_config.json": json.dumps(fields).encode(), "tokenizer.json": tokenizer.encode()}
    hub.repositories[NAME].commit(files | {"model.safetensors": b"large"})
    assert read_tokenizer(NAME, "data.tokenizer").to_json() == {"kind": "tokenizer.json", "text": tokenizer}
    assert Template(read_template(NAME), ()).turns([{"role": "user", "content": "1"}]) == [
        ("\n\"<s>[{'role': 'user', 'content': '1'}]", False)
    ]
    assert {path.rpartition("/")[2] for path in hub.read} == {*files}
    bpe = ("data=chat", "data.tokens=bpe", "data.tokenizer=x", "data.path=x")
    assert missing_places(configured(*bpe, f"data.template={NAME}"), ["data.path: x", "data.tokenizer: x"]) == []
    assert "hf" in extras(configured(*bpe, f"data.template={NAME}"))


def test_a_run_starts_from_an_export_on_the_hub_as_from_one_in_a_folder(
    hub: Hub, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.writer = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    how = (f"data.path={text}", f"data.cache_dir={tmp_path}/cache")
    train_here("first", *how, "train.max_steps=2")
    assert cli.run("export", ["first", "folder", "--push", NAME]) == 0
    repository = hub.repositories[NAME]
    repository.token = TOKEN  # it is private: the fixture is told so, and asks for the token from now on
    assert (repository.visibility, len(repository.commits)) == ("private", 2)  # its first, and ours
    pushed = repository.commits[repository.main]
    own = {"README.md", "run.yaml", ".gitattributes"}
    assert {name: raw for name, raw in pushed.items() if name not in own} == files(Path("folder"))
    for url, run in ((NAME, "named"), ("folder", "here")):
        train_here(run, *how, f"model.init_from={url}", "train.max_steps=4")
    assert digest_at("named", 4) == digest_at("here", 4)
    # What the card says makes the same bits.
    card = pushed["README.md"].decode()
    assert digest_at("first", 2) in card
    [command] = re.findall("^mingpt train (.*)$", card, re.M)
    Path("again").mkdir()
    Path("again/run.yaml").write_bytes(pushed["run.yaml"])
    assert attempt([*command.split(), "world.device=cpu", "track=[]"], Lifetime()) == 0
    assert digest_at("runs/again", 2) == digest_at("first", 2)
    out, err = capsys.readouterr()
    assert TOKEN not in out + err + str(pushed)
    assert hub.carried == []  # the CDN did not get it
    assert [asked for asked in hub.strange if "agent" not in asked] == []


def test_a_push_replaces_nothing_unasked_and_needs_a_token_that_may_write(
    hub: Hub, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, told: Told,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    hub.writer = TOKEN
    train_here("run", f"data.path={text}", f"data.cache_dir={tmp_path}/cache", "train.max_steps=2")
    said = ""
    for token, options, code in (
        (TOKEN, [], 64),
        ("", ["--push", NAME], 64),
        (f"{TOKEN}-of-another", ["--push", NAME], 64),
        (TOKEN, ["--push", "no-owner"], 64),
        (TOKEN, ["--push", NAME, "--public"], 0),
        (TOKEN, ["--push", NAME], 64),
        (TOKEN, ["--push", f"hf://{NAME}", "--overwrite"], 0),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        capsys.readouterr()
        assert cli.run("export", ["run", *options]) == code, options
        out, err = capsys.readouterr()
        said += err if code else ""
        assert TOKEN not in out + err
    assert said.count("permission denied (") == 2  # the hub's own words follow
    told(re.sub(r" \(.*\): check it", ": check it", said))
    assert hub.repositories[NAME].visibility == "public"
