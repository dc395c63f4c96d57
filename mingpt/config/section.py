"""What the config is made of: sections of strict, frozen fields.

A field's attribute docstring is its help text. A field says itself whether its value affects the result: all do but
those that are marked NO_RESULT or AffectsResult; affecting.py asks. A default may follow other keys:
`${run.dir}/snapshots`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST = (
    2**31 - 1
)  # of any setting but seed and cache_bytes: 68 years in seconds; beyond it torch, numpy and timers overflow
MISSING = "???"  # the default of a key that has to be set: OmegaConf's word for it


@dataclass(frozen=True)
class AffectsResult:
    """On a field: whether another value gives other bits, which may depend on the values of its section."""

    when: Callable[[Mapping[str, Any]], bool]


NO_RESULT = AffectsResult(lambda section: False)


@dataclass(frozen=True)
class Parts:
    """On a field that holds sections by name: their schemas. A section's `kind` chooses one, the first by default."""

    schemas: tuple[type["Section"], ...]


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    """What a manifest has, of a data set or a snapshot."""

    # A key that this version does not know would be lost without a word where a fork writes a manifest again.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Section(BaseModel):
    # Strict types, except that YAML's `1` may stand for a float; inf and nan are never a sensible setting.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        serialize_by_alias=True,  # `_target_`, which can't be an attribute's name
    )

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: Any, info: ValidationInfo) -> Any:
        limit = 2**63 - 1 if info.field_name in ("seed", "cache_bytes") else LARGEST
        if isinstance(value, (int, float)) and value > limit:
            raise PydanticCustomError("too_large", "must be at most {limit}", {"limit": limit})
        return value


class Own(Section):
    """A section whose `_target_` names code of the user's own; its other keys are that code's arguments."""

    model_config = ConfigDict(extra="allow")

    target: str = Field(default="", alias="_target_")

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


def follows(text: str, **bounds: Any) -> Any:
    """A field whose default is that of other keys: `${run.dir}/snapshots`."""
    return Field(default=text, **bounds)
