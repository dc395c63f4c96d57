"""A Dockerfile's steps in clean root folders: executed as they are written, where there is no container engine.

A base image is a fresh Debian with its own Python (the Dockerfile's has the same Debian and a newer Python). Of this
machine nothing is inside but how to reach package indexes: pip's and npm's settings, certificates, the name server.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
PYTHON = r"python:3\.12-slim-bookworm@sha256:[0-9a-f]{64}"
LIMIT = 1200  # seconds for one step
# What a builder gets from its machine, if it is there, and the files that these variables name.
INDEX_FILES = ["/etc/pip.conf", "/etc/resolv.conf"]
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
INDEX_VARIABLES = re.compile(r"(?i)(pip|npm_config|ssl|node_extra_ca)_|.*_proxy$")
ENTER = """set -e
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
shift
exec "$@"
"""


def debian(folder: Path) -> None:
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder)],
        check=True, stdout=subprocess.DEVNULL, timeout=LIMIT,
    )  # fmt: skip
    shutil.copy(Path("/") / CERTIFICATES, folder / CERTIFICATES)
    (folder / "etc/resolv.conf").unlink(missing_ok=True)


@dataclass
class Stage:
    root: Path
    workdir: str = "/"
    user: str = "0"
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"})
    command: list[str] = field(default_factory=list)

    def enter(self, command: list[str], env: dict[str, str] | None = None) -> list[str]:
        """A command inside, with /proc and /dev, in a mount namespace of its own."""
        words = [f"{k}={v}" for k, v in {**self.env, **(env or {})}.items()]
        inside = ["chroot", f"--userspec={self.user}:{self.user}", str(self.root), "env", "-i", *words]
        inside += ["sh", "-c", 'cd "$0" && exec "$@"', self.workdir, *command]
        return ["unshare", "--mount", "sh", "-c", ENTER, "sh", str(self.root), *inside]

    def run(self, command: str) -> None:
        """A RUN step, with this machine's way to package indexes for as long as it takes."""
        variables = {k: v for k, v in os.environ.items() if INDEX_VARIABLES.match(k)}
        lent: list[Path] = []
        named = [word for value in variables.values() for word in value.split() if word.startswith("/")]
        for name in [*INDEX_FILES, *named]:
            here, there = Path(name), self.root / name[1:]
            if here.exists() and not there.exists():
                there.parent.mkdir(parents=True, exist_ok=True)
                (shutil.copytree if here.is_dir() else shutil.copy)(here, there)
                lent.append(there)
        done = subprocess.run(
            self.enter(["sh", "-c", command], variables), capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 0, f"RUN {command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        for path in lent:
            (shutil.rmtree if path.is_dir() else os.unlink)(path)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    text = re.sub(r"(?m)^#.*\n", "", dockerfile.read_text())
    steps = [line.split(None, 1) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, rest in steps]


def build(dockerfile: Path, context: Path, base: Path, folder: Path) -> Stage:
    """Execute every step; returns the last stage."""
    ignored = (dockerfile.parent / f"{dockerfile.name}.dockerignore").read_text().splitlines()
    sent = [line[1:] for line in ignored if line.startswith("!")]
    stages, numbers = dict[str, Stage](), count()
    stage = Stage(base)
    for word, rest in instructions(dockerfile):
        match word:
            case "FROM":
                image, _, name = rest.partition(" AS ")
                assert image in stages or re.fullmatch(PYTHON, image), image
                parent = stages.get(image, Stage(base))
                # Not by its name, which may be that of `base` in `folder`.
                stage = replace(parent, root=folder / f"stage-{next(numbers)}", env={**parent.env})
                stages[name] = stage
                copy = ["cp", "-a", "--reflink=auto", str(parent.root), str(stage.root)]
                subprocess.run(copy, check=True, timeout=LIMIT)
            case "WORKDIR":
                stage.workdir = rest
                (stage.root / rest[1:]).mkdir(parents=True, exist_ok=True)
            case "ENV":
                for pair in shlex.split(rest):
                    key, _, value = pair.partition("=")
                    stage.env[key] = value.replace("$PATH", stage.env["PATH"])
            case "USER":
                stage.user = rest
            case "COPY":
                words = rest.split()
                source = stages[words.pop(0).removeprefix("--from=")].root if words[0].startswith("--from=") else None
                *names, target = words
                for name in names:
                    assert source or any(fnmatch(name, pattern) for pattern in sent), f"{name} is kept from the builder"
                    there = stage.root / stage.workdir[1:] / target if target[0] != "/" else stage.root / target[1:]
                    there.parent.mkdir(parents=True, exist_ok=True)
                    what = source / name[1:] if source else context / name
                    if target.endswith("/") or target == ".":
                        there.mkdir(parents=True, exist_ok=True)
                        there /= what.name
                    ignore = shutil.ignore_patterns("__pycache__")
                    (
                        shutil.copytree(what, there, symlinks=True, ignore=ignore)
                        if what.is_dir()
                        else shutil.copy(what, there)
                    )
            case "RUN":
                stage.run(f"cd {stage.workdir} && {rest}")
            case "CMD":
                stage.command = json.loads(rest)
            case _:
                raise AssertionError(f"no such step here: {word}")
    return stage
