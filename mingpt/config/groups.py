"""Where configs come from: configs/, folders of the user's own, and the registered kinds of models and data."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from pydantic.fields import FieldInfo

import mingpt
from mingpt.config.keys import KINDS, SECTIONS, complete, description
from mingpt.config.schema import Config

Groups = dict[str, dict[str, str]]


def config_dir() -> Path:
    """configs/: inside an installed wheel, or beside the package in a checkout."""
    package = Path(mingpt.__file__).resolve().parent
    return next(p for p in (package / "configs", package.parent / "configs") if p.is_dir())


def folders(searchpath: Iterable[str]) -> list[Path]:
    """Those of a hydra.searchpath: of `file://` places, and of the packages in `pkg://` ones."""
    out: list[Path] = []
    for place in searchpath:
        scheme, separator, rest = place.partition("://")
        if scheme == "pkg":
            spec = None
            with suppress(ImportError, ValueError):  # a part of the name is no package, or there is no name
                spec = find_spec(rest.replace("/", "."))
            out += [Path(p) for p in (spec.submodule_search_locations if spec else None) or ()]
        else:
            out.append(Path(rest if separator else place))
    return out


def groups(own: Sequence[Path] = ()) -> Groups:
    """Each group's options, with the first comment line of each one's file, or what its kind says of itself."""
    found: Groups = {s: {kind: description(k) for kind, k in of.items()} for s, of in KINDS.items()}
    for folder in (*own, config_dir()):  # where two have one name, Hydra takes the one of configs/
        for file in folder.glob("*/*.yaml"):
            if not file.is_file() or file.name.startswith("."):  # a folder; an editor's lock, which leads nowhere
                continue
            text = ""
            with suppress(OSError):  # one that is chosen is read, and told, by Hydra
                text = file.read_text(errors="replace")
            comments = (line[1:].strip() for line in text.splitlines() if line[:1] == "#")
            comment = next((c for c in comments if c and not c.startswith("@")), "")
            found.setdefault(file.parent.name, {})[file.stem] = comment
    return {group: {o: found[group][o] for o in sorted(found[group], key="{}.yaml".format)} for group in sorted(found)}


def offer(own: Sequence[Path] = ()) -> None:
    """Let Hydra know `schema`, every key outside of kinds with its default, and an option for each kind that has no
    file: `data=random` is data.kind=random. Keys of a section that are in neither are for validation.py to refuse.
    """
    store, schema = ConfigStore.instance(), OmegaConf.create()
    for name, field in Config.model_fields.items():
        if name in KINDS or name in SECTIONS:
            schema[name] = complete(SECTIONS[name], {}, FieldInfo.get_default) if name in SECTIONS else {}
            OmegaConf.set_struct(schema[name], False)
        else:
            schema[name] = field.get_default()
    store.store("schema", schema)
    for section, kinds in KINDS.items():
        store.repo.pop(section, None)
        for kind in kinds:  # of one that a file has, too, Hydra would take this for the schema
            if not any((folder / section / f"{kind}.yaml").is_file() for folder in (*own, config_dir())):
                store.store(kind, {"kind": kind}, group=section)
