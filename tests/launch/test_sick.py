"""run.dir/sick-hosts: who reads it, and who adds to it."""

from pathlib import Path

import pytest

from mingpt.launch.sick import main
from mingpt.observe import sick


@pytest.mark.parametrize("run", ["file", "memory://sick/run"])  # where nothing can be appended
def test_a_host_is_added_once(run: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run") if run == "file" else run
    assert sick.read(run) == []
    for host in ("n2", "n1", "n2"):
        sick.add(run, host)
    assert sick.read(run) == ["n2", "n1"]


def test_a_person_may_edit_the_file(tmp_path: Path) -> None:
    (tmp_path / "sick-hosts").write_text("\n n3 \nn1\nn3")
    sick.add(str(tmp_path), "n4")
    assert sick.read(str(tmp_path)) == ["n3", "n1", "n4"]


def test_job_sh_is_told_the_newest_step_and_the_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sick.add(f"{tmp_path}/run", "n2")
    sick.add(f"{tmp_path}/run", "n3")
    assert main(["--nproc-per-node=2", f"run.dir={tmp_path}/run"]) == 0
    assert capsys.readouterr().out == "0 n2 n3\n"
