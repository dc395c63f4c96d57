"""@LIST as a source of `mingpt prepare`: a file or URL with one source a line."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import bpe_kit
import web_kit
from mingpt.data.dataset import DataSet
from mingpt.errors import UserError
from mingpt.prepare.documents import Options
from mingpt.prepare.prepare import prepare
from mingpt.prepare.sources import expanded
from prepare_kit import some_texts, write_jsonl

NO_LIST = "names no source, is not UTF-8, or has 99 bytes: write one source a line"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder with three files, and its URL."""
    (folder := tmp_path / "site").mkdir()
    (folder / "more").mkdir()
    for i, name in enumerate(("0.jsonl", "1.jsonl", "more/2.jsonl")):
        write_jsonl(folder / name, some_texts(20, seed=i))
    with web_kit.served(folder) as url:
        yield folder, url


def prepared(sources: list[str], out: Path) -> DataSet:
    return prepare(sources, str(out), bpe_kit.small(), Options(val_fraction=0.1))


def test_a_list_on_the_web_is_its_files_in_its_order(tmp_path: Path, site: tuple[Path, str]) -> None:
    folder, url = site
    lines = ["# all of it", "", f"{url}/1.jsonl", " more/2.jsonl\r", "/0.jsonl", "./1.jsonl"]  # one of them twice
    (folder / "urls.txt").write_bytes("\ufeff".encode() + "\n".join(lines).encode())
    dataset = prepared([f"@{url}/urls.txt?X-Signature=s3cret"], tmp_path / "out")
    here = [str(folder / name) for name in ("1.jsonl", "more/2.jsonl", "0.jsonl")]
    assert dataset == prepared(here, tmp_path / "here")
    assert "s3cret" not in "".join(p.read_text(errors="replace") for p in (tmp_path / "out").iterdir())


def test_a_list_here_names_files_beside_it_and_anywhere(tmp_path: Path, site: tuple[Path, str]) -> None:
    folder, url = site
    (folder / "more" / "list").write_text(f"2.jsonl\n../0*.jsonl\n{url}/1.jsonl\n{folder}/1.jsonl\n")
    place = f"{folder}/more"
    expected = [f"{place}/2.jsonl", f"{place}/../0*.jsonl", f"{url}/1.jsonl", f"{folder}/1.jsonl", "x"]
    assert list(expanded([f"@{folder}/more/list", "x"])) == expected
    assert sum(s.documents for s in prepared([f"@{folder}/more/list"], tmp_path / "out").shards) == 80


@pytest.mark.parametrize(
    "line",
    [
        "file:///etc/passwd",
        "file:/etc/passwd",
        "simplecache::/etc/passwd",
        "local://x",
        "memory://x",
        "https://a::file:///etc/passwd",
    ],
)
def test_a_list_from_elsewhere_names_no_file_of_this_machine(site: tuple[Path, str], line: str) -> None:
    folder, url = site
    (folder / "urls.txt").write_text(f"0.jsonl\n{line}\n")
    with pytest.raises(UserError) as error:
        list(expanded([f"@{url}/urls.txt"]))
    assert str(error.value) == f"SOURCES=@{url}/urls.txt line 2: {line}: a list from elsewhere names files elsewhere"


def test_an_absolute_path_in_a_list_of_a_bucket_is_one_of_the_bucket() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/lists/urls.txt", b"s3://bucket/a.txt\n")
    try:
        assert list(expanded(["@memory://lists/urls.txt"])) == ["s3://bucket/a.txt"]
        memory.pipe_file("/lists/urls.txt", b"/etc/passwd\n")
        with pytest.raises(UserError, match="a list from elsewhere names files elsewhere"):
            list(expanded(["@memory://lists/urls.txt"]))
    finally:
        memory.rm("/lists", recursive=True)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"# nothing\n\n", NO_LIST),
        (b"a\n\xff", NO_LIST),
        (b"a" * 100, NO_LIST),
        (None, "there is no such file or bucket: check the spelling"),
    ],
)
def test_no_list_is_a_clear_mistake(
    site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, content: bytes | None, problem: str
) -> None:
    monkeypatch.setattr("mingpt.prepare.sources.LONGEST", 99)
    folder, url = site
    if content is not None:
        (folder / "urls.txt").write_bytes(content)
    for place in (str(folder), url):
        with pytest.raises(UserError) as error:
            list(expanded([f"@{place}/urls.txt"]))
        assert str(error.value) == f"SOURCES=@{place}/urls.txt: {problem}"
