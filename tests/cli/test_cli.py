"""The `mingpt` command, as the console script that an installation makes."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from mingpt import TORCH
from mingpt.cli import console
from mingpt.cli.cli import about, run, verb_of, warn_of_newer_torch
from mingpt.cli.parsers import GROUPS, VERBS, parse
from mingpt.compose.commandline import CommandLine
from tests.kits.frozen_kit import ARCHIVES, unpack
from tests.kits.paths_kit import ROOT
from tests.kits.verb_kit import mingpt

Captured = pytest.CaptureFixture[str]


class Installed:
    """Runs programs in a folder, with `mingpt` on their PATH as pip writes it."""

    def __init__(self, folder: Path) -> None:
        (script := folder / "bin/mingpt").parent.mkdir()
        program = "import sys\nfrom mingpt.cli.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
        script.write_text(f"#!{sys.executable}\n{program}")
        script.chmod(0o755)
        # Without an empty entry, which would be the current folder.
        self.libraries = ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.folder, self.path = folder, f"{script.parent}:{os.environ['PATH']}"

    def start(self, *program: str, out: int = subprocess.PIPE, **variables: str) -> "subprocess.Popen[str]":
        env = os.environ | {"PATH": self.path, "PYTHONPATH": self.libraries} | variables
        return subprocess.Popen(program, cwd=self.folder, env=env, stdout=out, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


@pytest.fixture
def a_run(tmp_path: Path) -> str:
    """The folder of a run."""
    return f"{unpack(ARCHIVES[-1], tmp_path / 'frozen')}/runs/resized"


def python(code: str) -> list[str]:
    """What this program prints, in words."""
    return subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=600).split()


def ended(words: str) -> int:
    """The exit code of the command, in this process."""
    given = words.split()
    return run(given[0], given[1:]) if verb_of(given) else about(given)


def test_help_groups_the_verbs_and_is_shown_without_one(capsys: Captured) -> None:
    assert ended("snapshot runs/a") == 64
    assert "did you mean snapshots?" in capsys.readouterr().err
    assert ended("") == 64
    out, text = capsys.readouterr()
    assert out == ""
    for words in ("-h", "--help", "help"):
        assert ended(words) == 0
        assert capsys.readouterr() == (text, "")
    for title, verbs in GROUPS.items():
        assert re.search(rf"^{title}:\n" + "".join(rf"  {verb} .*\n" for verb in verbs), text, re.M)


def test_each_verbs_options_are_known_without_torch_and_help_takes_the_standard_library_alone() -> None:
    code = "import sys; before = {*sys.modules}; import mingpt.cli.cli; print(*({*sys.modules} - before))"
    assert {name.partition(".")[0] for name in python(code)} - sys.stdlib_module_names == {"mingpt"}
    code = (
        "import sys; from mingpt.cli.parsers import VERBS, parser_of\n"
        "for name, verb in VERBS.items():\n"
        "    usage = parser_of(name).format_usage().split()\n"
        "    ends = (parser_of(name).epilog or '').startswith('Exit codes: 0')\n"
        "    print(usage[2] if verb.options and ends else name if not verb.options else '?')\n"
        "print('torch' in sys.modules)"
    )
    assert python(code) == [*VERBS, "False"]


def test_a_torch_newer_than_tested_is_a_warning_of_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    major, minor = TORCH
    for version, warned in ((f"{major}.{minor}.9+cpu", 0), (f"{major}.{minor + 1}.0a0", 1), ("3.0.0", 1)):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        warn_of_newer_torch()
        assert capsys.readouterr().err.count("\n") == warned


# --- output that is lost ---


COMMANDS = [*VERBS, *(f"snapshots {name}" for name in ("list", "verify", "digest", "show", "prune"))]


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_help_of_each_verb_ends_with_a_command_that_can_be_given(verb: str) -> None:
    last = mingpt(f"{verb} --help").rstrip().splitlines()[-1]
    program, *words = shlex.split(last.removeprefix("Example: "))
    assert (program, words[0]) == ("mingpt", verb.split()[0])
    if words[0] == "train":
        assert CommandLine.of(words[1:]).problems == ()
    else:
        parse(words[0], words[1:])


@pytest.mark.parametrize("verb", ["diff --help", "log"])
def test_output_that_a_full_disk_takes_is_an_error(
    verb: str, a_run: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(console, "lost", False)
    with suppress(OSError), open("/dev/full", "w") as full:  # what is left in its buffer
        monkeypatch.setattr(sys, "stdout", full)
        assert ended(f"{verb} {a_run}") == 70
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.slow
def test_a_program_says_so_too_and_a_run_ends_before_that(installed: Installed) -> None:
    words = "train data=random data.vocabulary=50 model=gpt-nano train.max_steps=1 run.dir=there"
    with open("/dev/full", "w") as full, installed.start("mingpt", *words.split(), out=full.fileno()) as process:
        assert "No space left on device" in process.communicate(timeout=600)[1]
    assert process.returncode == 70
    assert [*installed.folder.glob("there/snapshots/*/manifest.json")]


@pytest.mark.parametrize(("words", "code"), [("--version", 0), ("log nowhere", 64)])
def test_without_standard_output_a_command_ends_as_with_it(
    words: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)  # as Python has it after `mingpt … >&-`
    assert ended(words) == code


@pytest.mark.slow
def test_output_that_nobody_reads_any_more_is_none(a_run: str, installed: Installed) -> None:
    with installed.start("mingpt", "generate", a_run, "--tokens=1000000") as process:
        assert process.stdout
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr
        assert process.stderr.read() == ""
    assert process.returncode == 0


# --- processes of their own ---


def test_help_needs_no_current_folder(installed: Installed) -> None:
    (gone := installed.folder / "gone").mkdir()
    with installed.start("sh", "-c", f"cd {gone} && rmdir {gone} && mingpt plan --help") as process:
        said = process.communicate(timeout=600)
    assert (process.returncode, said[1]) == (0, ""), said


BASH = """
eval "$(mingpt completion bash)"
while IFS= read -r COMP_LINE; do
    COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMPREPLY=()
    _python_argcomplete mingpt
    (IFS='|'; printf '%s\\n' "${COMPREPLY[*]}")
done
"""
WORDS = {
    "mingpt ": "|".join(VERBS),
    "mingpt snapshots re": "rewind ",
    "mingpt export --o": "--overwrite ",
    "mingpt fetch g": "gpt2-vocabulary ",
    "mingpt train model=gpt2-m": "gpt2-medium ",  # bash takes what follows the = for a word of its own
    "mingpt launch --nproc-per-node 2 seed=1 --rdzv-b": "--rdzv-backend ",
    "mingpt preflight --rdzv-backend ": "c10d|static",
    "mingpt nonsense ": "",
}


@pytest.mark.slow
def test_bash_completes_exactly_these_words(installed: Installed) -> None:
    with installed.start("bash", "-c", f"{BASH.rstrip()} <<< $'" + "\\n".join(WORDS) + "'") as bash:
        assert dict(zip(WORDS, bash.communicate(timeout=600)[0].splitlines(), strict=True)) == WORDS


# --- signals ---

STOPPED = ("train", "launch")  # before their first step; the others end as shells report a signal


def assert_ended(process: "subprocess.Popen[str]", verb: str, number: signal.Signals) -> None:
    process.send_signal(number)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == (75 if verb in STOPPED else 128 + number)
    assert len(errors.splitlines()) <= 1
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [*STOPPED, "prepare x --out=y --tokenizer=z", "log x"])
def test_a_signal_while_libraries_are_imported_ends_a_verb_without_a_trace(
    words: str, number: signal.Signals, installed: Installed, tmp_path: Path
) -> None:
    for name in ("torch", "hydra", "pydantic", "fsspec", "argcomplete"):
        (library := tmp_path / "libraries" / name / "__init__.py").parent.mkdir(parents=True)
        library.write_text("import time\nprint('importing', flush=True)\ntime.sleep(100)\n")
    libraries = f"{tmp_path}/libraries:{installed.libraries}"
    with installed.start("mingpt", *words.split(), PYTHONPATH=libraries) as process:
        assert process.stdout
        assert process.stdout.readline() == "importing\n"
        assert_ended(process, words.split()[0], number)


@pytest.mark.slow
def test_a_signal_while_a_store_is_waited_for_ends_a_verb_without_a_trace(installed: Installed) -> None:
    keys: dict[str, Any] = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(600)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = ("mingpt", "fork", "s3://b/run@1", "there")
        with installed.start(*words, **keys, AWS_ENDPOINT_URL=address) as process:
            connection, _ = silent.accept()
            with connection:
                assert_ended(process, "fork", signal.SIGINT)
