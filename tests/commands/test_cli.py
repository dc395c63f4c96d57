"""The `mingpt` command, as the console script that an installation makes."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import mingpt
from bpe_kit import write_gpt2
from mingpt import console
from mingpt.cli import GROUPS, VERBS, main
from mingpt.command import command
from mingpt.gone import KEYS
from paths_kit import ROOT

Captured = pytest.CaptureFixture[str]
RUN = str(ROOT / "tests/frozen/runs/resized")


class Mingpt:
    """Runs `mingpt …` in a folder. env: has it on its PATH, as pip writes it from what pyproject.toml says."""

    def __init__(self, folder: Path) -> None:
        settings = (ROOT / "pyproject.toml").read_text()
        [(module, name)] = re.findall(r'^\[project.scripts\]\nmingpt = "([\w.]+):(\w+)"$', settings, re.M)
        script = folder / "bin/mingpt"
        script.parent.mkdir()
        program = f"import sys\nfrom {module} import {name}\nif __name__ == '__main__':\n    sys.exit({name}())\n"
        script.write_text(f"#!{sys.executable}\n{program}")
        script.chmod(0o755)
        # Without an empty entry, which would be the current folder.
        libraries = ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.folder = folder
        self.env = os.environ | {"PATH": f"{script.parent}:{os.environ['PATH']}", "PYTHONPATH": libraries}

    def start(self, *command: str, **variables: str) -> "subprocess.Popen[str]":
        pipe, env = subprocess.PIPE, self.env | variables
        return subprocess.Popen(command, cwd=self.folder, env=env, stdout=pipe, stderr=pipe, text=True)

    def __call__(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        with self.start("mingpt", *arguments) as process:
            out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def run(tmp_path: Path) -> Mingpt:
    return Mingpt(tmp_path)


def python(code: str) -> list[str]:
    """What this program prints, in words."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["mingpt", *arguments])
    return main()


def test_help_groups_the_verbs_and_is_shown_without_one(run: Mingpt) -> None:
    done = run()
    assert (done.returncode, done.stdout) == (64, "")
    for words in ("-h", "--help", "help"):
        told = run(words)
        assert (told.returncode, told.stdout, told.stderr) == (0, done.stderr, "")
    for title, verbs in GROUPS.items():
        assert re.search(rf"^{title}:\n" + "".join(rf"  {verb} .*\n" for verb in verbs), done.stderr, re.M)


def test_version_tells_what_bits_depend_on(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    import torch

    assert ended(monkeypatch, "--version") == 0
    python = ".".join(map(str, sys.version_info[:3]))
    told = f"mingpt {mingpt.__version__}\nnumerics {mingpt.NUMERICS}\ntorch {torch.__version__}\nPython {python}\n"
    assert capsys.readouterr().out == told


def test_each_verbs_options_are_known_without_torch_and_help_takes_the_standard_library_alone() -> None:
    code = "import sys; before = {*sys.modules}; import mingpt.cli; print(*({*sys.modules} - before))"
    assert {name.partition(".")[0] for name in python(code)} - sys.stdlib_module_names == {"mingpt"}
    code = (
        "import sys; from importlib import import_module; from mingpt.cli import VERBS\n"
        "for name, verb in VERBS.items():\n"
        "    sys.argv = [f'mingpt {name}']\n"
        "    print(import_module(verb.options or verb.module).parser().format_usage().split()[2])\n"
        "print('torch' in sys.modules)"
    )
    assert python(code) == [*VERBS, "False"]


@pytest.mark.parametrize("verb", ["snapshot", "serve", "receipt", "materialize", "sky-check", "sweep"])
def test_a_mistaken_verb_and_one_of_earlier_versions_say_what_to_use(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert ended(monkeypatch, verb, "runs/a") == 64
    assert KEYS.get(f"mingpt {verb}", "did you mean snapshots?") in capsys.readouterr().err


# --- output that is lost ---


@pytest.mark.parametrize("verb", ["diff --help", "snapshots list", "log", "generate"])
def test_output_that_a_full_disk_takes_is_an_error(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(console, "lost", False)
    with suppress(OSError), open("/dev/full", "w") as full:  # what is left in its buffer
        monkeypatch.setattr(sys, "stdout", full)
        assert ended(monkeypatch, *verb.split(), RUN) == 70
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("words", ["train experiment=synthetic train.max_steps=1 run.dir=there", "launch --help"])
def test_a_program_says_so_too_and_a_run_ends_before_that(words: str, run: Mingpt) -> None:
    with open("/dev/full", "w") as full:
        command, pipe = ["mingpt", *words.split()], subprocess.PIPE
        done = subprocess.run(command, cwd=run.folder, env=run.env, stdout=full, stderr=pipe, text=True)
    assert done.returncode == 70, done.stderr
    assert re.fullmatch("error: .*No space left on device.*\n", done.stderr)
    assert "train" not in words or [*run.folder.glob("there/snapshots/*/manifest.json")]


def test_output_of_a_module_that_is_a_program_is_lost_as_that_of_its_verb() -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-m", "mingpt.commands.log", RUN], stdout=full).returncode == 70


@pytest.mark.parametrize(("arguments", "code"), [("--version", 0), ("log nowhere", 64)])
def test_without_standard_output_a_command_ends_as_with_it(
    arguments: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `mingpt … >&-`
    monkeypatch.setattr(sys, "stderr", None)
    assert ended(monkeypatch, *arguments.split()) == code


@pytest.mark.slow
def test_output_that_nobody_reads_any_more_is_none(run: Mingpt) -> None:
    with run.start("mingpt", "generate", RUN, "--tokens=1000000") as process:
        assert process.stdout
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_an_error_that_nobody_expects_is_no_failed_check(capsys: Captured) -> None:
    @command()
    def broken(arguments: list[str]) -> int:
        raise KeyError(arguments[0])

    assert broken(["key"]) == 70
    assert "KeyError: 'key'" in capsys.readouterr().err


# --- processes of their own ---


@pytest.mark.slow
def test_code_of_the_current_folder_is_found_and_shadows_no_library(run: Mingpt) -> None:
    for name in ("numpy", "pydantic", "fsspec", "argcomplete"):
        (run.folder / f"{name}.py").write_text(f"open('ran-{name}', 'w')")
    (run.folder / "mine.py").touch()
    for arguments in ("--help", "completion bash", "snapshots list .", "train model._target_=mine.Net"):
        done = run(*arguments.split())
        assert not [*run.folder.glob("ran-*")], arguments
    assert "the module mine has no Net" in done.stderr


def test_launch_refuses_a_folder_whose_mingpt_its_workers_would_train_with(run: Mingpt) -> None:
    (package := run.folder / "mingpt").symlink_to(ROOT / "mingpt")
    arguments = ("launch", "--dry-run", "--nproc-per-node=2", "experiment=synthetic")
    done = run(*arguments)
    assert (done.returncode, done.stdout.endswith(" -m mingpt.train experiment=synthetic\n")) == (0, True)
    package.unlink()
    package.mkdir()
    (package / "__init__.py").touch()
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert str(package) in done.stderr


@pytest.mark.slow
def test_prepare_starts_its_processes_from_the_console_script(run: Mingpt) -> None:
    write_gpt2(run.folder)
    (run.folder / "a.txt").write_text("to be, or not to be")
    done = run("prepare", "a.txt", "--out", "out", "--tokenizer", ".", "--processes", "2", "--val-fraction", "0")
    assert done.returncode == 0, done.stderr


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
def test_bash_completes_exactly_these_words(run: Mingpt) -> None:
    with run.start("bash", "-c", f"{BASH.rstrip()} <<< $'" + "\\n".join(WORDS) + "'") as bash:
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
@pytest.mark.parametrize("verb", [*STOPPED, "fetch", "prepare", "evaluate", "log"])
def test_a_signal_while_libraries_are_imported_ends_a_verb_without_a_trace(
    verb: str, number: signal.Signals, run: Mingpt, tmp_path: Path
) -> None:
    for name in ("torch", "hydra", "pydantic", "fsspec", "argcomplete"):
        (library := tmp_path / "libraries" / name / "__init__.py").parent.mkdir(parents=True)
        library.write_text("import time\nprint('importing', flush=True)\ntime.sleep(100)\n")
    with run.start("mingpt", verb, "x", PYTHONPATH=f"{tmp_path}/libraries:{run.env['PYTHONPATH']}") as process:
        assert process.stdout
        assert process.stdout.readline() == "importing\n"
        assert_ended(process, verb, number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ("snapshots verify {}", signal.SIGTERM),
        ("fork {}@1 there", signal.SIGINT),
        ("evaluate {}", signal.SIGTERM),
        ("prepare {}/a.txt --out=there --tokenizer={}/b.json", signal.SIGINT),
        ("preflight experiment=synthetic run.dir={}", signal.SIGTERM),
    ],
)
def test_a_signal_while_a_store_is_waited_for_ends_a_verb_without_a_trace(
    arguments: str, number: signal.Signals, run: Mingpt
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(600)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = arguments.format(*["s3://bucket/run"] * 2).split()
        with run.start("mingpt", *words, AWS_ENDPOINT_URL=address, **keys) as process:
            connection, _ = silent.accept()
            with connection:
                assert_ended(process, words[0], number)
