"""@LIST as a source of `mingpt prepare`: a file with one source a line."""

from pathlib import Path

import pytest

from mingpt.prepare.prepare import parser


def test_a_list_names_its_lines(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("b.jsonl\nhttps://host/a.jsonl\n")
    options = ["--out=o", "--tokenizer=t"]
    sources = parser().parse_args(["x", f"@{tmp_path}/list", "y", *options]).sources
    assert sources == ["x", "b.jsonl", "https://host/a.jsonl", "y"]


def test_no_list_is_a_clear_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="64"):
        parser().parse_args([f"@{tmp_path}/none"])
    assert f"{tmp_path}/none" in capsys.readouterr().err
