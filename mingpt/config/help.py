"""What --help and --info say."""

import json
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.default_element import DefaultsTreeNode, InputDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import RunMode

from mingpt.command import program
from mingpt.config.commandline import CommandLine
from mingpt.config.groups import groups
from mingpt.config.keys import KINDS, choices, description, keys, named, schema_of
from mingpt.redact import without_secrets

USAGE = """\
Overrides have Hydra's grammar: key=value, group=option, +new=value, ~gone.

Options:
  --config-dir DIR     a folder of your own with experiment/, model/, data/ …, looked in after configs/
  --config-name NAME   begin with NAME.yaml, of such a folder, in place of train.yaml
  --cfg job            print the config and stop; with --resolve its ${…} are filled in
  --info WHAT          where the config comes from: searchpath, defaults, defaults-tree, config, plugins, all

Groups (group=option):"""


def help_text(own: Sequence[Path] = ()) -> str:
    """Every group with its options, every key with what it takes and its default. own: folders of the user's."""
    lines = [f"{program('mingpt.train')} [options] [override ...]", "", USAGE]
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


def info(line: CommandLine, config: str) -> str:
    """Where the config of a command line comes from, in Hydra's own objects. config: what --cfg job prints."""
    there_are = groups(line.folders)
    overrides = [*line.for_hydra, *(str(o.input_line) for o in line.overrides if o.key_or_group in there_are)]
    with initialize_config_dir(str(line.main), version_base="1.3"):
        sources = compose(line.config_name, overrides, return_hydra_config=True).hydra.runtime.config_sources
        loader = GlobalHydra.instance().config_loader()
        defaults = loader.compute_defaults_list(line.config_name, overrides, RunMode.RUN)
    listed = [f"  {d.config_path} (package {d.package or '_global_'})" for d in defaults.defaults if d.config_path]
    places = [f"  {s.provider}: {without_secrets(f'{s.schema}://{s.path}')}" for s in sources]
    plugins = Plugins.instance().discover()
    parts = {
        "searchpath": ["Search path:", *places],
        "defaults-tree": ["Defaults tree:", *_tree(defaults.defaults_tree, 1)],
        "defaults": ["Defaults list, where the last one wins:", *listed],
        "config": ["Config:", config],
        "plugins": ["Hydra's plugins:", *sorted(f"  {plugin.__module__}.{plugin.__name__}" for plugin in plugins)],
    }
    wanted = parts if line.info == "all" else [str(line.info)]
    return "\n\n".join("\n".join(parts[name]) for name in wanted)


def _tree(node: DefaultsTreeNode | InputDefault, depth: int) -> list[str]:
    element, children = (node.node, node.children or []) if isinstance(node, DefaultsTreeNode) else (node, [])
    if element.is_virtual():
        return [line for child in children for line in _tree(child, depth)]
    name = "_self_" if element.is_self() else element.get_config_path()
    return [f"{'  ' * depth}{name}", *(line for child in children for line in _tree(child, depth + 1))]
