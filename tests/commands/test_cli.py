"""The `mingpt` command, as the console script that an installation makes."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

import mingpt
from bpe_kit import write_gpt2
from cli_kit import ROOT, Mingpt
from mingpt import console
from mingpt.cli import GROUPS, VERBS, main
from mingpt.command import command
from mingpt.gone import KEYS


@pytest.fixture
def run(tmp_path: Path) -> Mingpt:
    return Mingpt(tmp_path)


def test_help_groups_the_verbs(run: Mingpt) -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for title, verbs in GROUPS.items():
        listed = re.search(rf"^{title}:\n((?:  .*\n)+)", done.stdout, re.M)
        assert listed
        assert [line.split()[0] for line in listed[1].splitlines()] == list(verbs)


def test_without_a_verb_the_help_is_shown_and_nothing_counts_as_done(run: Mingpt) -> None:
    done = run()
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == run("-h").stdout == run("help").stdout
    with run.start(sys.executable, "-m", "mingpt", "--help") as module:
        assert module.communicate(timeout=600)[0] == done.stderr


def test_a_mistaken_verb_is_told_with_the_nearest_one(run: Mingpt) -> None:
    done = run("snapshot", "list")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == "error: unknown command 'snapshot' (did you mean snapshots?); see mingpt --help\n"


def test_version_tells_what_bits_depend_on(run: Mingpt) -> None:
    import torch

    done = run("--version")
    assert done.returncode == 0
    python = ".".join(map(str, sys.version_info[:3]))
    told = f"mingpt {mingpt.__version__}\nnumerics {mingpt.NUMERICS}\ntorch {torch.__version__}\nPython {python}\n"
    assert done.stdout == told


def test_each_verb_has_options_that_are_known_without_torch_and_its_name_is_in_its_usage(run: Mingpt) -> None:
    code = (
        "import sys; from importlib import import_module; from mingpt.cli import VERBS\n"
        "for name, verb in VERBS.items():\n"
        "    sys.argv = [f'mingpt {name}']\n"
        "    print(import_module(verb.options or verb.module).parser().format_usage().split('[')[0].strip())\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=run.env, capture_output=True, text=True, timeout=600)
    *usage, torch = done.stdout.splitlines()
    assert torch == "False", done.stderr
    assert [line.removeprefix("usage: ") for line in usage if line.startswith("usage: ")] == [
        f"mingpt {name}" for name in VERBS
    ]


def test_help_and_completion_import_the_standard_library_alone() -> None:
    code = "import sys; before = {*sys.modules}; import mingpt.cli; print(*({*sys.modules} - before))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    found = {module.partition(".")[0] for module in done.stdout.split()}
    assert found - sys.stdlib_module_names == {"mingpt"}, done.stderr


def test_every_verb_is_a_program_of_its_own_too() -> None:
    for verb in VERBS.values():
        assert callable(import_module(verb.module).main), verb


@pytest.mark.parametrize("verb", ["serve", "receipt", "materialize", "sky-check"])
def test_a_verb_of_earlier_versions_leaves_a_line(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mingpt", verb, "runs/a"])
    assert main() == 64
    assert capsys.readouterr().err == f"error: mingpt {verb} is gone: {KEYS[f'mingpt {verb}']}\n"


# --- output that is lost ---

RUN = str(ROOT / "tests/frozen/runs/resized")
PROGRAMS = {"train", "launch", "evaluate", "sweep"}  # that handle signals, and end their process
PRINTING = [
    *([verb, "--help"] for verb in sorted(VERBS.keys() - PROGRAMS)),
    ["snapshots", "list", RUN],
    ["log", RUN],
    ["generate", RUN, "--tokens=2"],
]


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_output_that_a_full_disk_takes_is_an_error(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "lost", False)
    monkeypatch.setattr(sys, "argv", ["mingpt", *arguments])
    with suppress(OSError), open("/dev/full", "w") as full:  # what is left in its buffer
        monkeypatch.setattr(sys, "stdout", full)
        code = main()
    assert code == 70
    assert re.fullmatch("error: .*No space left on device.*\n", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("verb", sorted(PROGRAMS))
def test_a_program_says_so_too_and_a_run_ends_before_that(verb: str, run: Mingpt) -> None:
    arguments = ["experiment=synthetic", "train.max_steps=1", "run.dir=there"] if verb == "train" else ["--help"]
    with open("/dev/full", "w") as full:
        command = ["mingpt", verb, *arguments]
        done = subprocess.run(command, cwd=run.folder, env=run.env, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 70, done.stderr
    assert re.fullmatch("error: .*No space left on device.*\n", done.stderr)
    assert verb != "train" or [*run.folder.glob("there/snapshots/*/manifest.json")]


def test_output_of_a_module_that_is_a_program_is_lost_as_that_of_its_verb() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "mingpt.commands.log", RUN], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 70


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["log", "nowhere"], 64)], ids=str)
def test_without_standard_output_a_command_ends_as_with_it(
    arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mingpt", *arguments])
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after `mingpt … >&-`
    monkeypatch.setattr(sys, "stderr", None)
    assert main() == code


@pytest.mark.slow
def test_output_that_nobody_reads_any_more_is_none(run: Mingpt) -> None:
    with run.start("mingpt", "generate", RUN, "--tokens=1000000") as process:
        assert process.stdout
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_an_error_that_nobody_expects_is_no_failed_check(capsys: pytest.CaptureFixture[str]) -> None:
    @command()
    def broken(arguments: list[str]) -> int:
        raise KeyError(arguments[0])

    assert broken(["key"]) == 70
    assert "KeyError: 'key'" in capsys.readouterr().err


# --- what a verb does is what `python -m` of its module does ---


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("launch", ["--nnodes=0"]),
        pytest.param("train", ["model=gpt3"], marks=pytest.mark.slow),
        pytest.param("snapshots", ["list", "nowhere"], marks=pytest.mark.slow),
    ],
)
def test_exit_codes_and_words_are_those_of_the_verbs_module(verb: str, arguments: list[str], run: Mingpt) -> None:
    done = run(verb, *arguments)
    with run.start(sys.executable, "-m", f"mingpt.{verb}", *arguments) as module:
        assert (done.stdout, done.stderr) == module.communicate(timeout=600)
    assert done.returncode == module.returncode == 64


def test_launch_has_torchrun_start_workers_as_before(run: Mingpt) -> None:
    done = run("launch", "--dry-run", "--nproc-per-node=2", "experiment=synthetic")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" -m mingpt.train experiment=synthetic\n")


@pytest.mark.slow
def test_export_is_a_verb(run: Mingpt) -> None:
    done = run("export", "nowhere", "folder")
    assert (done.returncode, done.stderr[:14]) == (64, "error: nowhere")
    assert run("export", "--help").stdout.startswith("usage: mingpt snapshots export [-h]")


@pytest.mark.slow
def test_code_of_ones_own_is_found_in_the_folder_where_the_command_is_started(run: Mingpt) -> None:
    (run.folder / "mine.py").touch()
    done = run("train", "model._target_=mine.Net", "data._target_=mine.rows")
    assert "the module mine has no Net" in done.stderr


@pytest.mark.slow
def test_code_of_the_current_folder_shadows_no_library(run: Mingpt) -> None:
    for name in ("numpy", "pydantic", "fsspec", "argcomplete"):
        (run.folder / f"{name}.py").write_text(f"open('ran-{name}', 'w')")
    for arguments in ("--help", "completion bash", "snapshots list .", "train model._target_=mine.Net"):
        run(*arguments.split())
        assert not [*run.folder.glob("ran-*")], arguments


def test_launch_refuses_a_folder_whose_mingpt_its_workers_would_train_with(run: Mingpt) -> None:
    (package := run.folder / "mingpt").symlink_to(ROOT / "mingpt")
    arguments = ("launch", "--dry-run", "--nproc-per-node=2", "experiment=synthetic")
    assert run(*arguments).returncode == 0
    package.unlink()
    package.mkdir()
    (package / "__init__.py").touch()
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == (
        f"error: the workers would train with {package}, and this launcher is {ROOT / 'mingpt'}: start in another "
        f"folder, or run `python -m mingpt.launch` here to use the first\n"
    )
    assert run("launch", "--help").returncode == 0


@pytest.mark.slow
def test_prepare_starts_its_processes_from_the_console_script(run: Mingpt) -> None:
    write_gpt2(run.folder)
    (run.folder / "a.txt").write_text("to be, or not to be")
    done = run("prepare", "a.txt", "--out", "out", "--tokenizer", ".", "--processes", "2", "--val-fraction", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("train on it: data=shards data.path=out\n")


STOPPED = {  # before their first step; the others end as shells report a signal
    "train": "{}: stopped on request before the first step\n",
    "launch": "launch: exit code 75: {}: stopped on request before the first step\n",
    "sweep": "stopped on request: the same command again goes on\n",
}
WORDS = {
    "fetch": "interrupted: nothing is half written; the same command begins again\n",
    "prepare": "interrupted: the same command goes on\n",
    "selftest": "stopped\n",
    "preflight": "stopped\n",
}


def assert_ended(process: "subprocess.Popen[str]", verb: str, number: signal.Signals, *words: str) -> None:
    process.send_signal(number)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == (75 if verb in STOPPED else 128 + number)
    assert errors in (STOPPED.get(verb, "").format(number.name), *words)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("verb", VERBS)
def test_a_signal_while_libraries_are_imported_ends_a_verb_without_a_trace(
    verb: str, number: signal.Signals, run: Mingpt, tmp_path: Path
) -> None:
    for name in ("torch", "hydra", "pydantic", "fsspec", "argcomplete"):
        (library := tmp_path / "libraries" / name / "__init__.py").parent.mkdir(parents=True)
        library.write_text("import time\nprint('importing', flush=True)\ntime.sleep(100)\n")
    with run.start("mingpt", verb, "x", PYTHONPATH=f"{tmp_path}/libraries:{run.env['PYTHONPATH']}") as process:
        assert process.stdout
        assert process.stdout.readline() == "importing\n"
        assert_ended(process, verb, number, WORDS.get(verb, ""))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "arguments",
    [
        ["snapshots", "verify", "{}"],
        ["log", "{}"],
        *(
            pytest.param(arguments, marks=pytest.mark.slow)
            for arguments in (
                ["generate", "{}"],
                ["evaluate", "{}"],
                ["report", "{}"],
                ["replay", "{}@1"],
                ["audit", "{}"],
                ["diff", "{}", "there"],
                ["fork", "{}@1", "there"],
                ["rewind", "{}@1"],
                ["export", "{}", "there"],
                ["prepare", "{}/a.txt", "--out=there", "--tokenizer={}/b.json"],
                ["preflight", "experiment=synthetic", "run.dir={}"],
            )
        ),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_signal_while_a_store_is_waited_for_ends_a_verb_without_a_trace(
    arguments: list[str], number: signal.Signals, run: Mingpt
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(600)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = ["mingpt", *(argument.format("s3://bucket/run") for argument in arguments)]
        with run.start(*command, AWS_ENDPOINT_URL=address, **keys) as process:
            connection, _ = silent.accept()
            with connection:
                assert_ended(process, arguments[0], number, WORDS.get(arguments[0], ""), "")  # cleaning up was too slow
