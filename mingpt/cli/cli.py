"""The `mingpt` command: from a command line to a verb's function and its exit code.

Only the standard library is imported here: help and completion answer at once, and what ends the process from outside
is seen to before the seconds that torch's import takes. parsers.py has the verbs.
"""

import gc
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from mingpt import NUMERICS, TORCH, __version__
from mingpt.cli.command import code_of, expanded, raising
from mingpt.cli.console import complain, ended, say
from mingpt.cli.parsers import GROUPS, VERBS, Verb, parse
from mingpt.errors import FINISHED, STOPPED, USER_ERROR, UserError, exit_now
from mingpt.world.env import Env

if TYPE_CHECKING:
    from mingpt.world.lifetime import Lifetime

# Hydra's options after which `mingpt train` trains nothing itself, by what answers them.
ANSWERS = {
    "config.editor:print_schema": {"--json-schema"},
    "commands.multirun:multirun": {"-m", "--multirun", "hydra.mode=MULTIRUN"},
    "compose.compose:printing": {
        "-h", "--help", "-c", "--cfg", "-i", "--info", "--hydra-help", "-sc", "--shell-completion",
    },
}  # fmt: skip


def main(verb: str = "") -> NoReturn:
    """Run the program, and end this process with its exit code. verb: that of `python -m mingpt.VERB`."""
    with suppress(FileNotFoundError):  # somebody has deleted the current folder
        if sys.path[0] == os.getcwd():
            sys.path.append(sys.path.pop(0))  # `python -m` puts the current folder first, where a torch.py may lie
    words = [*([verb] if verb else []), *sys.argv[1:]]
    if "_ARGCOMPLETE" in os.environ:  # a shell asks at a TAB
        import_module("mingpt.cli.completion").answer()
    found = verb_of(words)
    if found is None:
        sys.exit(about(words))
    lifetime = begun(found, words[0])
    code = run(words[0], words[1:], lifetime)
    if found.trains or found.joins:
        # After an error, the traceback keeps process groups and so gloo's threads alive (see joining.join).
        exit_now(code)
    sys.exit(code)


def begun(verb: Verb, name: str) -> "Lifetime":
    """What ends the process from outside is seen to from now on. Ends it if Slurm's variables are incomplete."""
    # A third of all that `mingpt --help` would import.
    from mingpt.world import slurm
    from mingpt.world.env import keep_from_current_folder
    from mingpt.world.lifetime import Lifetime

    keep_from_current_folder()
    try:
        if verb.joins:  # if srun has started it, torchrun's variables follow from Slurm's
            slurm.set_torchrun_variables(os.environ)
    except UserError as error:
        complain(f"error: {error}")
        sys.exit(USER_ERROR)
    code = STOPPED if name == "train" else None  # of its multirun, until that handles signals itself
    lifetime = Lifetime("launch: exit code {code}: " if name == "launch" else "", verb.trains, code)
    lifetime.begin()
    env = Env.read()
    if verb.trains and not env.ours and not env.rank:  # once a launch
        warn_of_newer_torch()
    return lifetime


def warn_of_newer_torch() -> None:
    version = torch_version()
    newest = ".".join(map(str, TORCH))
    if (number := re.match(r"(\d+)\.(\d+)", version)) and tuple(map(int, number.groups())) > TORCH:
        complain(
            f"warning: torch {version} is newer than {newest}, the newest that this mingpt was tested with: if it "
            f"fails, install 'torch<{TORCH[0]}.{TORCH[1] + 1}'"
        )


def verb_of(words: Sequence[str]) -> Verb | None:
    """The verb that a command line names, if it names one; of `mingpt train`, what answers its options."""
    verb = VERBS.get(words[0]) if words else None
    if verb and verb.options is None:
        given = {*words, *(word.partition("=")[0] for word in words)}
        for function, options in ANSWERS.items():
            if options & given:
                return replace(verb, function=function, trains=False, joins=False)
    return verb


@contextmanager
def importing() -> Iterator[None]:
    """What is imported here stays until the process ends: it is not searched for garbage, now or later.

    Imports are most of a short command's time, and a quarter of that was the search for garbage. From the command to
    the second step of a small model: 1.65 in place of 2.25 CPU seconds.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run(name: str, arguments: list[str], lifetime: "Lifetime | None" = None) -> int:
    """Parse a verb's options, import its function, and call it. Returns the exit code."""
    verb = verb_of([name, *arguments])
    assert verb

    def act() -> int:
        words = expanded(name, arguments, os.environ)
        sys.argv = [f"mingpt {name}", *words]  # for Hydra
        options = words if verb.options is None else parse(name, words)
        module, _, function = getattr(options, "function", verb.function).partition(":")
        try:
            with importing():
                call = getattr(import_module(f"mingpt.{module}"), function)
        except ImportError as error:  # one of torch's libraries is missing, or the installation is incomplete
            raise UserError(
                f"this Python environment is broken: {error}: install the project again, as its README says"
            ) from error
        with raising() if verb.interrupted else nullcontext():
            code: int = call(options, lifetime) if verb.trains or verb.joins else call(options)
        return code

    code = code_of(act, verb.interrupted)
    # A worker that has finished is not started again, whatever becomes of its output: its launcher prints, too.
    return code if Env.read().agent else ended(code)


def about(words: Sequence[str]) -> int:
    """Print the help, or the versions, or what is wrong with a command line that names no verb; the exit code."""
    name = words[0] if words else ""
    if name in ("--help", "-h", "help"):
        say(help_text())
        return ended(FINISHED)
    if name == "--version":
        say(version_text())
        return ended(FINISHED)
    if not name:
        complain(help_text())
    else:
        close = get_close_matches(name, VERBS, n=1)
        complain(f"error: unknown command {name!r}{f' (did you mean {close[0]}?)' if close else ''}; see mingpt --help")
    return USER_ERROR


def help_text() -> str:
    lines = ["usage: mingpt COMMAND …", ""]
    for title, verbs in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<12} {verb.help}" for name, verb in verbs.items()), ""]
    last = "mingpt COMMAND --help says what a command takes; mingpt --version, which versions are here."
    return "\n".join([*lines, last])


def version_text() -> str:
    """The versions that the bits of a result depend on."""
    return f"mingpt {__version__}\nnumerics {NUMERICS}\ntorch {torch_version()}\nPython {sys.version.split()[0]}"


def torch_version() -> str:
    """torch is not asked, for its import takes seconds."""
    from importlib import metadata  # half of all that `mingpt --help` would import

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"
