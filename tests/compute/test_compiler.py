"""Where torch keeps what it compiles: found again by the next attempt, and nobody else's."""

import os
from pathlib import Path

import pytest

from mingpt.compute.compiler import FOLDER, keep_code
from tests.kits.config_kit import configured
from tests.kits.run_kit import train
from tests.kits.told import Told


def chosen(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    monkeypatch.delenv(FOLDER, raising=False)
    keep_code(configured(f"data.cache_dir={cache}").data)
    return Path(os.environ[FOLDER])


def test_each_attempt_finds_one_folder_that_is_this_users_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = chosen(monkeypatch, tmp_path / "cache")
    assert first.parent == tmp_path / f"cache/compiled-{os.getuid()}"
    assert first.parent.stat().st_mode & 0o777 == 0o700
    assert chosen(monkeypatch, tmp_path / "cache") == first
    monkeypatch.setenv(FOLDER, "/mine")
    keep_code(configured().data)
    assert os.environ[FOLDER] == "/mine"
    monkeypatch.delenv(FOLDER)
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_code(configured("data=random").data)  # data without a cache
    assert Path(os.environ[FOLDER]).parent == tmp_path / f".cache/mingpt/compiled-{os.getuid()}"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("how", ["others may write there", "a link", "a file", "another user's"])
def test_a_folder_that_another_may_have_filled_is_not_used(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    if how == "another user's" and os.getuid():
        pytest.skip("only root can give a folder away")
    users = tmp_path / f"compiled-{os.getuid()}"
    if how == "a file":
        users.touch()
    elif how == "a link":
        users.symlink_to(".")
    else:
        users.mkdir()
        users.chmod(0o777 if how == "others may write there" else 0o700)
        os.chown(users, 12345 if how == "another user's" else -1, -1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders = [chosen(monkeypatch, tmp_path) for _ in range(2)]
    assert folders[0] != folders[1]
    for folder in folders:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[1]
    told(lines[0], tmp_path, f"compiled-{os.getuid()}")


@pytest.mark.slow
def test_the_next_attempt_compiles_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)  # torch sets it when a test of this process compiles
    temporary, cache = tmp_path / "tmp", tmp_path / "cache"
    temporary.mkdir()
    # One matrix: a GPT's block takes 70 CPU s in place of 33, most of them the C++ compiler's.
    words = ["model._target_=tests.kits.own_kit.Linear", "data._target_=examples.classifier.rows", "data.count=300"]
    words += ["batch.global_size=8", "batch.micro_size=4", "train.compile=true", "train.eval_every=0"]
    known = list[set[Path]]()
    for steps in (1, 2):
        told = train(
            tmp_path, *words, f"run.dir={tmp_path}/run", f"train.max_steps={steps}", TMPDIR=str(temporary),
            HOME=str(tmp_path), XDG_CACHE_HOME=str(cache),
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        known.append({*(tmp_path / f".cache/mingpt/compiled-{os.getuid()}").rglob("*.so")})
    assert known[0]
    assert known[0] == known[1]
    assert [p for p in temporary.rglob("*") if p.is_file()] == []  # torch's own choice is /tmp/torchinductor_USER
