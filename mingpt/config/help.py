"""What --help and --info say."""

import json
from collections.abc import Sequence
from pathlib import Path

from mingpt.config.groups import groups
from mingpt.config.keys import KINDS, choices, description, keys, named, schema_of

USAGE = """\
A Hydra application: overrides are key=value, group=option, +new=value, ~gone.

Options:
  --config-dir, -cd DIR     a folder of your own with experiment/, model/, data/ …, looked in after configs/
  --config-name, -cn NAME   begin with NAME.yaml, of such a folder, in place of train.yaml
  --config-path, -cp DIR    a folder in place of configs/
  --multirun, -m            a run for each of several values: docs/sweeps.md
  --cfg, -c WHAT            print the config and stop: job, hydra, all (--resolve fills in its ${…}; -p PACKAGE: a part)
  --info, -i WHAT           where the config comes from: defaults, defaults-tree, searchpath, plugins, config, all
  --hydra-help              Hydra's own settings, launchers and sweepers
  --json-schema             print the JSON schema of config files, for editors: docs/configure.md

Groups (group=option):"""


def help_text(own: Sequence[Path] = ()) -> str:
    """Every group with its options, every key with what it takes and its default. own: folders of the user's."""
    lines = ["mingpt train [options] [override ...]", "", USAGE]
    for group, options in groups(own).items():
        lines += [f"  {group}/", *(f"    {option:<16} {comment}" for option, comment in options.items())]
    lines += ["", "Keys (key=value):"]
    several = tuple(f"{section}." for section in KINDS)
    lines += [_line(key, text, {}) for key, text in keys().items() if not key.startswith(several)]
    for section, kinds in KINDS.items():
        of_kind = {kind: _lines(section, kind) for kind in kinds}
        common = set.intersection(*map(set, of_kind.values()))
        first, *_ = of_kind.values()
        lines += ["", f"Keys of {section}, whatever its kind:", *(line for line in first if line in common)]
        for kind, of in of_kind.items():
            lines += ["", f"Keys of {section}.kind={kind} ({description(kinds[kind])}):"]
            lines += [line for line in of if line not in common]
    lines += ["", "Example: mingpt train data=char data.path=book.txt run.name=book train.max_steps=500"]
    return "\n".join(lines)


def _lines(section: str, kind: str) -> list[str]:
    raw = {section: {"kind": kind}}
    return [_line(key, text, raw) for key, text in keys(raw).items() if key.startswith(f"{section}.")]


def _line(key: str, text: str, raw: dict[str, dict[str, str]]) -> str:
    section, _, name = key.rpartition(".")
    words = choices(key)
    takes = f" [{' | '.join(words)}]" if all(isinstance(w, str) for w in words) and words else ""
    default = named(schema_of(section, raw))[name].get_default()
    shown = default if isinstance(default, str) and default else json.dumps(default)
    return f"  {key:<28} {text}{takes}" + ("" if key in {f"{s}.kind" for s in KINDS} else f" ({shown})")
