"""What --help and --info say."""

import json
from collections.abc import Sequence
from pathlib import Path

from mingpt.compose.groups import groups
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
        lines.append(f"  {group}/")
        for option, comment in options.items():
            lines.append(f"    {option:<16} {comment}")
    lines += ["", "Keys (key=value):"]
    for key, text in keys().items():
        if key.partition(".")[0] not in KINDS:
            lines.append(_line(key, text, {}))
    for section, kinds in KINDS.items():
        of_kind = {kind: _lines(section, kind) for kind in kinds}
        common = set.intersection(*map(set, of_kind.values()))
        first, *_ = of_kind.values()
        lines += ["", f"Keys of {section}, whatever its kind:", *filter(common.__contains__, first)]
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
    takes = f" [{' | '.join(words)}]" if words else ""
    line = f"  {key:<28} {text}{takes}"
    if section in KINDS and name == "kind":
        return line
    default = named(schema_of(section, raw))[name].get_default()
    return f"{line} ({default if isinstance(default, str) and default else json.dumps(default)})"
