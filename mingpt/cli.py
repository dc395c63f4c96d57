"""The `mingpt` command: one verb a line, each a program of its own that `python -m` of its module starts, too.

Only the standard library is imported here: help and completion answer at once, and a verb's module decides itself what
comes before the seconds that torch's import takes.
"""

import os
import platform
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module, metadata

from mingpt import NUMERICS, __version__
from mingpt.console import complain, ended, say
from mingpt.errors import FINISHED, USER_ERROR
from mingpt.gone import instead


@dataclass(frozen=True)
class Verb:
    """module: has main(). options: module with parser(), importable without torch (default: module).

    several: a subcommand of `mingpt snapshots`.
    """

    help: str
    module: str
    options: str = ""
    several: bool = False


GROUPS = {
    "Train": {
        "train": Verb(
            "train a GPT in this process; with -m, several",
            "mingpt.train.__main__",
            "mingpt.config.commandline",
        ),
        "launch": Verb("train with several, on one node or many", "mingpt.launch.__main__", "mingpt.launch.torchrun"),
        "plan": Verb("say how much memory a run needs, before a machine is rented", "mingpt.commands.plan"),
        "preflight": Verb("look at the nodes before training", "mingpt.preflight.__main__", "mingpt.preflight.command"),
        "selftest": Verb("try whether this machine computes right", "mingpt.selftest.__main__"),
    },
    "Look and use": {
        "generate": Verb("continue texts with a run's model", "mingpt.generate"),
        "evaluate": Verb("say how good a run's model is", "mingpt.evaluate"),
        "report": Verb("show what runs have done, as one HTML page", "mingpt.report.__main__"),
        "replay": Verb("compute a past step again, and look at it", "mingpt.replay"),
        "snapshots": Verb("list, verify, copy, prune or rewind a run's snapshots", "mingpt.snapshots"),
        "log": Verb("show runs, forks, attempts and snapshots as a tree", "mingpt.commands.log"),
        "audit": Verb("compute past intervals again, and say whether they are right", "mingpt.commands.audit"),
        "diff": Verb("say where two runs parted, and by what", "mingpt.commands.diff"),
        "fork": Verb("begin a run from a step of another one", "mingpt.commands.fork"),
        "rewind": Verb("take a run back to an earlier step, or undo that", "mingpt.snapshots", several=True),
        "export": Verb("write a run's model for transformers serve, vLLM and others", "mingpt.snapshots", several=True),
    },
    "Prepare": {
        "fetch": Verb("get a corpus or a vocabulary", "mingpt.data.fetch", "mingpt.prepare.fetch"),
        "prepare": Verb("turn text into token shards", "mingpt.data.prepare", "mingpt.prepare.prepare"),
        "completion": Verb("have bash, zsh or fish complete all of this", "mingpt.completion"),
    },
}
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}


def main() -> int:
    """Run the verb of the command line. Returns the exit code, or the verb ends the process itself."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks at a TAB
        from mingpt.completion import answer

        answer(VERBS)
    if len(sys.argv) < 2:
        complain(help_text())
        return USER_ERROR
    name, *arguments = sys.argv[1:]
    if name in ("--help", "-h", "help"):
        say(help_text())
        return ended(FINISHED)
    if name == "--version":
        say(version_text())
        return ended(FINISHED)
    if cure := instead(f"mingpt {name}"):
        complain(f"error: {cure}")
        return USER_ERROR
    if name not in VERBS:
        close = get_close_matches(name, VERBS, n=1)
        complain(f"error: unknown command {name!r}{f' (did you mean {close[0]}?)' if close else ''}; see mingpt --help")
        return USER_ERROR
    return run(name, arguments)


def run(name: str, arguments: list[str]) -> int:
    verb = VERBS[name]
    sys.argv = [f"mingpt {'snapshots' if verb.several else name}", *([name] if verb.several else []), *arguments]
    try:
        code = import_module(verb.module).main()
    except SystemExit as end:
        code = end.code
    return ended(code or FINISHED)


def help_text() -> str:
    lines = ["usage: mingpt COMMAND …", ""]
    for title, verbs in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<12} {verb.help}" for name, verb in verbs.items()), ""]
    last = "mingpt COMMAND --help says what a command takes; mingpt --version, which versions are here."
    return "\n".join([*lines, last])


def version_text() -> str:
    """The versions that the bits of a result depend on. torch is not asked, for its import takes seconds."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return f"mingpt {__version__}\nnumerics {NUMERICS}\ntorch {torch}\nPython {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
