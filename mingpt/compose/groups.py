"""Where configs come from: configs/, folders of the user's own, and the schema with its kinds of models and data."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from pydantic.fields import FieldInfo

import mingpt
from mingpt.config.keys import KINDS, complete, description, schemas
from mingpt.config.schema import Config

Groups = dict[str, dict[str, str]]


def config_dir() -> Path:
    """configs/: inside an installed wheel, or beside the package in a checkout."""
    package = Path(mingpt.__file__).resolve().parent
    return next(p for p in (package / "configs", package.parent / "configs") if p.is_dir())


def folders(searchpath: Iterable[str]) -> list[Path]:
    """The folders of a hydra.searchpath: its `file://` places, and those of the packages in `pkg://` ones."""
    out: list[Path] = []
    for place in searchpath:
        scheme, separator, rest = place.partition("://")
        if scheme == "pkg":
            spec = None
            with suppress(ImportError, ValueError):  # a part of the name is no package, or there is no name
                spec = find_spec(rest.replace("/", "."))
            if spec:
                out += map(Path, spec.submodule_search_locations or ())
        else:
            out.append(Path(rest if separator else place))
    return out


def groups(own: Sequence[Path] = ()) -> Groups:
    """Each group's options, with the first comment line of each one's file, or what its kind says of itself."""
    by_group: Groups = {s: {kind: description(k) for kind, k in of.items()} for s, of in KINDS.items()}
    for folder in (*own, config_dir()):  # where two have one name, Hydra takes the one of configs/
        for file in folder.glob("*/*.yaml"):
            if not file.is_file() or file.name.startswith("."):  # a folder; an editor's lock, which leads nowhere
                continue
            text = ""
            with suppress(OSError):  # one that is chosen is read, and told, by Hydra
                text = file.read_text("utf-8-sig", "replace")
            by_group.setdefault(file.parent.name, {})[file.stem] = _first_comment(text)
    ordered: Groups = {}
    for group, options in sorted(by_group.items()):
        # As their files stand in a folder: gpt2-large.yaml before gpt2.yaml.
        ordered[group] = {option: options[option] for option in sorted(options, key="{}.yaml".format)}
    return ordered


def _first_comment(text: str) -> str:
    """Not Hydra's own: `# @package _global_`."""
    for line in text.split("\n"):
        comment = line[1:].strip()
        if line[:1] == "#" and comment and not comment.startswith("@"):
            return comment
    return ""


# Hydra looks for `# @package` in the first lines of a file, and a byte-order mark before it hid it.
_header = ConfigSource._get_header_dict
ConfigSource._get_header_dict = staticmethod(lambda text: _header(text.removeprefix("\ufeff")))  # type: ignore


class Places(SearchPathPlugin):
    """Has Hydra look in the folder of --config-dir, where it is asked to compose and not started as a program."""

    folder: ClassVar[str | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.folder:
            search_path.append("command-line", f"file://{Path(self.folder).absolute()}")


def offer(own: Sequence[Path] = ()) -> None:
    """Let Hydra know `schema`, the defaults of all keys outside of kinds; `schema/data=KIND`, those of a kind; and an
    option for each kind that has no file: `data=random`. A key that is in none of them is refused later
    (config/validation.py).
    """
    Plugins.instance().register(Places)
    store, schema = ConfigStore.instance(), OmegaConf.create(defaults({}) | {section: {} for section in KINDS})
    for section in schemas({}):
        OmegaConf.set_struct(schema[section], False)
    store.store("schema", schema)
    for section, kinds in KINDS.items():
        store.repo.pop(section, None)
        for kind, of_kind in kinds.items():
            store.store(kind, complete(of_kind, {}, FieldInfo.get_default), group=f"schema/{section}")
            files = [folder / section / f"{kind}.yaml" for folder in (*own, config_dir())]
            # Of one that a file has, too, Hydra would take this for the schema.
            if not any(map(Path.is_file, files)):
                store.store(kind, {"kind": kind}, group=section)


def defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every key with its default, by the kinds that a plain config names."""
    of = schemas(raw)
    return {
        name: complete(of[name], {}, FieldInfo.get_default) if name in of else field.get_default()
        for name, field in Config.model_fields.items()
    }
