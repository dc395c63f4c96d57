"""The format of a snapshot: its parts, its manifest, its digest. No I/O here; docs/snapshots.md is the specification.

A snapshot holds two kinds of tensors, `model` (weights, under Hugging Face's names) and `optimizer`. They are laid out
in parts (safetensors files) by sorted name and size alone, so that any number of processes writes the same parts.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, Literal

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from torch import Tensor

FORMAT = 1
PART_BYTES = 64 * 2**20  # small enough to share out among processes, large enough for a request to a bucket each
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 64 * 2**20  # a reader takes no larger one into memory
PART_NAME = re.compile(r"(model|optimizer)-[0-9]{5}-[0-9a-f]{16}\.safetensors")
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

Kind = Literal["model", "optimizer"]
State = Mapping[Kind, Mapping[str, Tensor]]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Damaged(Exception):
    """A snapshot that is not what its writer wrote, or not one at all; the message names the file."""


class NewerFormat(Exception):
    """A whole manifest that a newer version of this program wrote. To set it aside would throw that work away."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PartInfo(Strict):
    size: int = Field(gt=0)
    sha256: Sha256


class TensorInfo(Strict):
    dtype: str
    shape: list[Annotated[int, Field(ge=0)]] = Field(max_length=8)
    sha256: Sha256
    part: str


class Metrics(Strict):
    """The losses of the snapshot's step, where they were measured. Functions of (config, step), and no state."""

    loss: float | None = Field(default=None, allow_inf_nan=False)
    val_loss: float | None = Field(default=None, allow_inf_nan=False)


class Manifest(Strict):
    """What manifest.json says. The last five fields are provenance: the digest does not cover them."""

    format: int
    run: str
    step: int = Field(ge=0)
    digest: Sha256
    parts: dict[str, PartInfo]
    tensors: dict[str, TensorInfo]
    vocabulary: dict[str, Any]
    config: dict[str, Any]
    fingerprint: dict[str, Any]
    history: list[dict[str, Any]]
    metrics: Metrics = Metrics()


@dataclass(frozen=True)
class Part:
    """The plan of one part: the tensors in it, by sorted name."""

    kind: Kind
    number: int
    names: tuple[str, ...]


def lay_out(state: State, part_bytes: int = PART_BYTES) -> list[Part]:
    """Cut the sorted tensors of each kind into parts of at most part_bytes (or one tensor that is larger)."""
    parts: list[Part] = []
    for kind, tensors in sorted(state.items()):
        groups: list[list[str]] = []
        room = 0
        for name in sorted(tensors):
            if not groups or tensors[name].nbytes > room:
                groups.append([])
                room = part_bytes
            groups[-1].append(name)
            room -= tensors[name].nbytes
        parts += [Part(kind, number, tuple(names)) for number, names in enumerate(groups, 1)]
    return parts


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of a contiguous CPU tensor's bytes, without copying them."""
    return sha256(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"").hexdigest()


def encode_part(part: Part, tensors: Mapping[str, Tensor]) -> tuple[str, bytes, PartInfo, dict[str, TensorInfo]]:
    """The part's file name, its bytes, and what the manifest says of it and of its tensors."""
    content = {name: tensors[name].detach().to("cpu").contiguous() for name in part.names}
    raw = safetensors.torch.save(content)
    info = PartInfo(size=len(raw), sha256=sha256(raw).hexdigest())
    name = f"{part.kind}-{part.number:05d}-{info.sha256[:16]}.safetensors"
    infos = {
        n: TensorInfo(dtype=DTYPES[t.dtype], shape=list(t.shape), sha256=tensor_sha256(t), part=name)
        for n, t in content.items()
    }
    return name, raw, info, infos


def decode_part(manifest: Manifest, name: str, raw: bytes) -> dict[str, Tensor]:
    """The tensors of a part, each checked against the manifest. Raises Damaged."""
    expected = manifest.parts[name]
    if len(raw) != expected.size:
        raise Damaged(f"{name} has {len(raw)} bytes in place of {expected.size}")
    if sha256(raw).hexdigest() != expected.sha256:
        raise Damaged(f"{name} does not have the checksum that the manifest gives")
    try:
        tensors = safetensors.torch.load(raw)
    except Exception as error:  # KeyError or RuntimeError for headers that its own parser lets through
        raise Damaged(f"{name} is no safetensors file: {error}") from error
    infos = {n: t for n, t in manifest.tensors.items() if t.part == name}
    if infos.keys() != tensors.keys():
        raise Damaged(f"{name} does not hold the tensors that the manifest lists")
    for n, info in infos.items():
        tensor = tensors[n]
        if (DTYPES.get(tensor.dtype), list(tensor.shape)) != (info.dtype, info.shape):
            raise Damaged(f"{name}: {n} has another dtype or shape than the manifest gives")
        if tensor_sha256(tensor) != info.sha256:
            raise Damaged(f"{name}: {n} does not have the checksum that the manifest gives")
    return tensors


def digest_of(tensors: Mapping[str, TensorInfo]) -> str:
    """sha256 over the sorted lines `name dtype shape sha256`: equal digests mean equal training state."""
    lines = sorted(f"{name} {t.dtype} {json.dumps(t.shape)} {t.sha256}\n" for name, t in tensors.items())
    return sha256("".join(lines).encode()).hexdigest()


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False).encode()


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON with a checksum over all the rest, so that damage to any field is seen."""
    fields = manifest.model_dump()
    return _canonical(fields | {"checksum": sha256(_canonical(fields)).hexdigest()})


def _no_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {key!r} stands there twice")
        out[key] = value
    return out


def decode_manifest(raw: bytes) -> Manifest:
    """Raises Damaged unless the manifest is whole, consistent, and names nothing outside its own folder.

    Raises NewerFormat if it is whole and of a format to come: every format has `format` and this `checksum`.
    """
    try:
        fields = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Damaged(f"{MANIFEST} is not a JSON object")
    checksum, version = fields.pop("checksum", None), fields.get("format")
    try:
        if checksum != sha256(_canonical(fields)).hexdigest() or raw != _canonical(fields | {"checksum": checksum}):
            raise Damaged(f"{MANIFEST} does not have its own checksum")
        if type(version) is int and version > FORMAT:
            raise NewerFormat(f"format {version}; this version of mingpt reads {FORMAT}")
        if version != FORMAT:
            raise Damaged(f"{MANIFEST} has format {version!r}; this version of mingpt reads {FORMAT}")
        manifest = Manifest.model_validate(fields)
    except (ValidationError, ValueError, RecursionError) as error:  # ValueError: lone surrogates, NaN
        raise Damaged(f"{MANIFEST} does not follow the format: {error}") from error
    for name in manifest.parts:
        if not PART_NAME.fullmatch(name):
            raise Damaged(f"{MANIFEST} names a part {name!r}, which is no part's name")
    if {t.part for t in manifest.tensors.values()} != manifest.parts.keys():
        raise Damaged(f"{MANIFEST}: the parts and the tensors' parts differ")
    if manifest.digest != digest_of(manifest.tensors):
        raise Damaged(f"{MANIFEST}: the digest is not that of the tensors")
    return manifest
