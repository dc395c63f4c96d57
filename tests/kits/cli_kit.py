"""The `mingpt` command as an installation makes it, without one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mingpt

ROOT = Path(mingpt.__file__).resolve().parent.parent


class Mingpt:
    """Runs `mingpt …` in a folder. env: has it on its PATH, as pip writes it from what pyproject.toml says."""

    def __init__(self, folder: Path) -> None:
        settings = (ROOT / "pyproject.toml").read_text()
        (entry,) = re.findall(r'^\[project.scripts\]\nmingpt = "([\w.]+):main"$', settings, re.M)
        script = folder / "bin/mingpt"
        lines = [f"#!{sys.executable}", "import sys", f"from {entry} import main", "if __name__ == '__main__':"]
        script.parent.mkdir()
        script.write_text("\n".join([*lines, "    sys.exit(main())\n"]))
        script.chmod(0o755)
        # Without an empty entry, which would be the current folder.
        libraries = ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.folder = folder
        self.env = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}", "PYTHONPATH": libraries}

    def __call__(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        process = self.start("mingpt", *arguments)
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, *command: str, **variables: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.env | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
