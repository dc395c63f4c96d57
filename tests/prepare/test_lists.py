"""@LIST as a source of `mingpt prepare`: a file with one source a line."""

from pathlib import Path

import pytest

from bpe_kit import write_gpt2
from mingpt.prepare.prepare import main, parser


def test_a_list_names_its_lines(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("b.jsonl\nhttps://host/a.jsonl\n")
    options = ["--out=o", "--tokenizer=t"]
    sources = parser().parse_args(["x", f"@{tmp_path}/list", "y", *options]).sources
    assert sources == ["x", "b.jsonl", "https://host/a.jsonl", "y"]


def test_no_list_is_a_clear_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="64"):
        parser().parse_args([f"@{tmp_path}/none"])
    assert f"{tmp_path}/none" in capsys.readouterr().err


def code_of(arguments: list[str]) -> object:
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("line", [b"--out=elsewhere", b"\xff"])
def test_a_list_of_somebody_else_sets_no_option(tmp_path: Path, line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("to be or not to be")
    (tmp_path / "list").write_bytes(f"{tmp_path}/a.txt\n".encode() + line + b"\n")
    assert code_of([f"--out={tmp_path}/out", f"--tokenizer={write_gpt2(tmp_path / 'gpt2')}", f"@{tmp_path}/list"]) == 64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "gpt2", "list"]
