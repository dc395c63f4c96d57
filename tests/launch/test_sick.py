"""run.dir/sick-hosts: who reads it, and who adds to it."""

from pathlib import Path

import pytest

from mingpt.launch.sick import main
from mingpt.observe import sick


def test_a_host_is_added_once_and_a_person_may_edit_the_file(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert sick.read(run) == []
    for host in ("n2", "n1", "n2"):
        sick.add(run, host)
    assert (tmp_path / "run/sick-hosts").read_text() == "n2\nn1\n"
    (tmp_path / "run/sick-hosts").write_text("\n n3 \nn1\nn3")
    sick.add(run, "n4")
    assert sick.read(run) == ["n3", "n1", "n4"]


def test_where_nothing_can_be_appended() -> None:
    run = "memory://sick/run"
    sick.add(run, "n1")
    sick.add(run, "n2")
    assert sick.read(run) == ["n1", "n2"]


def test_job_sh_is_told_the_newest_step_and_the_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sick.add(f"{tmp_path}/run", "n2")
    sick.add(f"{tmp_path}/run", "n3")
    assert main(["--nproc-per-node=2", f"run.dir={tmp_path}/run"]) == 0
    assert capsys.readouterr().out == "0 n2 n3\n"
