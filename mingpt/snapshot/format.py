"""The format of a snapshot: its parts, its manifest, its digest. No I/O here; docs/snapshots.md is the specification.

A snapshot holds two kinds of tensors, `model` (weights, under Hugging Face's names) and `optimizer`. They are laid out
in parts (safetensors files) by sorted name and size alone, so that any number of processes writes the same parts.

The manifest says which tensors a part holds, and from that follow its header, its size and its name: a reader compares
the header and never parses it, and each byte is hashed once, on the way out and on the way in.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from torch import Tensor

from mingpt.errors import Damaged, OtherFormat, UserError

FORMAT = 3
READABLE = (2, FORMAT)  # format 2 had one tensor more, UNSTATED, which is no state
UNSTATED = "best_val_loss"
READS = "this version of mingpt reads 2 and 3"
PART_BYTES = 64 * 2**20  # small enough to share out among processes, large enough for a request to a bucket each
MANIFEST = "manifest.json"
# A reader takes no larger one into memory. The largest tokenizer.json (Gemma 3's, 33 MB) makes one of 38 MB, gpt2-xl's
# tensors add 0.6 MB.
MANIFEST_LIMIT = 48 * 2**20
MOST_VALUES = 500_000  # in a manifest, each of which costs a reader some 300 bytes; gpt2-xl has 19,000
MOST_ELEMENTS = 2**48  # of a tensor
PART_NAME = re.compile(r"(model|optimizer)-[0-9]{5}-[0-9a-f]{16}\.safetensors")
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

Kind = Literal["model", "optimizer"]
State = Mapping[Kind, Mapping[str, Tensor]]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PartInfo(Strict):
    size: int = Field(gt=0)


class TensorInfo(Strict):
    dtype: str
    shape: list[Annotated[int, Field(ge=0)]] = Field(max_length=8)
    sha256: Sha256
    part: str


class Metrics(Strict):
    """The losses of the snapshot's step, where they were measured. Functions of (config, step), and no state.

    best_val_loss: the lowest one up to this step. not_finite: names of those that were measured and are no number.
    """

    loss: float | None = Field(default=None, allow_inf_nan=False)
    val_loss: float | None = Field(default=None, allow_inf_nan=False)
    best_val_loss: float | None = Field(default=None, allow_inf_nan=False)
    not_finite: list[str] = []

    @classmethod
    def of(cls, **measured: float | None) -> "Metrics":
        """None: not measured."""
        known = {name: value for name, value in measured.items() if value is not None}
        finite = {name: value for name, value in known.items() if math.isfinite(value)}
        return cls(**finite, not_finite=sorted(known.keys() - finite.keys()))


class Manifest(Strict):
    """What manifest.json says. The digest covers `tensors` alone."""

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

    @property
    def attempt(self) -> int:
        """The number of the attempt that wrote it; 0 if the history does not say."""
        number = self.history[-1].get("attempt") if self.history else None
        return number if isinstance(number, int) else 0

    @cached_property
    def tensors_by_part(self) -> dict[str, dict[str, TensorInfo]]:
        found: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self.tensors.items():
            found.setdefault(info.part, {})[name] = info
        return found


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


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without copying them."""
    return tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _size_of(info: TensorInfo) -> int:
    """In bytes. Raises ValueError for a shape that would overflow torch's arithmetic; without bytes it could be any."""
    if math.prod(max(1, n) for n in info.shape) > MOST_ELEMENTS:
        raise ValueError(f"no tensor has the shape {info.shape}")
    return math.prod(info.shape) * TORCH_DTYPES[info.dtype].itemsize


def _in_file_order(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Larger elements first, so that each tensor is aligned; this is safetensors' own order, too."""
    return sorted(tensors, key=lambda name: (-TORCH_DTYPES[tensors[name].dtype].itemsize, name))


def header_of(tensors: Mapping[str, TensorInfo]) -> bytes:
    """The part's bytes before its first tensor: https://github.com/huggingface/safetensors#format."""
    header, end = dict[str, Any](), 0
    for name in _in_file_order(tensors):
        start, end = end, end + _size_of(tensors[name])
        header[name] = {"dtype": tensors[name].dtype, "shape": tensors[name].shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _part_name(stem: str, header: bytes, tensors: Mapping[str, TensorInfo]) -> str:
    """The stem (`model-00001`) and a hash of all that is in the file, by way of the tensors' own."""
    content = sha256(header + "".join(tensors[name].sha256 for name in _in_file_order(tensors)).encode())
    return f"{stem}-{content.hexdigest()[:16]}.safetensors"


@dataclass(frozen=True)
class EncodedPart:
    """A part as a file: its name, its bytes in order (not copied), and its tensors for the manifest."""

    name: str
    pieces: list[bytes | memoryview]
    tensors: dict[str, TensorInfo]

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self.pieces)


def encode_part(part: Part, tensors: Mapping[str, Tensor]) -> EncodedPart:
    content = {name: tensors[name].detach().to("cpu").contiguous() for name in part.names}
    infos = {
        n: TensorInfo(dtype=DTYPES[t.dtype], shape=list(t.shape), sha256=sha256(_bytes_of(t)).hexdigest(), part="")
        for n, t in content.items()
    }
    header = header_of(infos)
    name = _part_name(f"{part.kind}-{part.number:05d}", header, infos)
    infos = {n: info.model_copy(update={"part": name}) for n, info in infos.items()}
    return EncodedPart(name, [header, *(_bytes_of(content[n]) for n in _in_file_order(infos))], infos)


def checked(manifest: Manifest, name: str, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """A part's bytes as they come, each checked against the manifest: nothing is kept. Raises Damaged, at last."""
    infos = manifest.tensors_by_part[name]
    header = header_of(infos)
    wanted = iter(
        [
            (len(header), sha256(header).hexdigest(), f"{name} does not have the header that the manifest gives"),
            *(
                (_size_of(infos[n]), infos[n].sha256, f"{name}: {n} does not have the checksum that the manifest gives")
                for n in _in_file_order(infos)
            ),
        ]
    )
    left, checksum, complaint = next(wanted)
    found, size = sha256(), 0
    for piece in pieces:
        rest = piece
        while len(rest) >= left:  # this one ends here
            found.update(rest[:left])
            if found.hexdigest() != checksum:
                raise Damaged(complaint)
            rest = rest[left:]
            left, checksum, complaint = next(wanted, (2**63, "", ""))  # nothing may come any more
            found = sha256()
        found.update(rest)
        left -= len(rest)
        size += len(piece)
        yield piece
    if size != manifest.parts[name].size:
        raise Damaged(f"{name} has {size} bytes in place of {manifest.parts[name].size}")


def decode_part(manifest: Manifest, name: str, raw: memoryview) -> dict[str, Tensor]:
    """The tensors of a part, each checked against the manifest; they share its memory. Raises Damaged."""
    infos = manifest.tensors_by_part[name]
    if len(raw) != manifest.parts[name].size:
        raise Damaged(f"{name} has {len(raw)} bytes in place of {manifest.parts[name].size}")
    for _ in checked(manifest, name, [raw]):
        pass
    tensors, start = dict[str, Tensor](), len(header_of(infos))
    for n in _in_file_order(infos):
        dtype, end = TORCH_DTYPES[infos[n].dtype], start + _size_of(infos[n])
        flat = torch.frombuffer(raw[start:end], dtype=dtype) if end > start else torch.empty(0, dtype=dtype)
        if manifest.format >= 3 or n != UNSTATED:
            tensors[n] = flat.view(infos[n].shape)
        start = end
    return tensors


def digest_of(tensors: Mapping[str, TensorInfo]) -> str:
    """sha256 over the sorted lines `name dtype shape sha256`: equal digests mean equal training state."""
    lines = sorted(f"{name} {t.dtype} {json.dumps(t.shape)} {t.sha256}\n" for name, t in tensors.items())
    return sha256("".join(lines).encode()).hexdigest()


CANONICAL = json.JSONEncoder(sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return CANONICAL.encode(fields).encode()


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON with a checksum over all the rest, so that damage to any field is seen.

    Raises UserError if no reader would take it.
    """
    fields = manifest.model_dump()
    raw = _canonical(fields | {"checksum": sha256(_canonical(fields)).hexdigest()})
    if len(raw) > MANIFEST_LIMIT or _values_in(raw) > MOST_VALUES:
        raise UserError(
            f"the snapshot's {MANIFEST} would have {len(raw)} bytes and {_values_in(raw)} values; readers take "
            f"{MANIFEST_LIMIT} and {MOST_VALUES}: take a smaller vocabulary (data.tokenizer), or fewer tensors"
        )
    return raw


def _values_in(raw: bytes) -> float:
    """About how many values a text of JSON holds, told without parsing it: parsed, it may be thirty times as large."""
    outside = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if outside.count(b'"') > 4 * MOST_VALUES:
        return math.inf
    outside = b"".join(outside.split(b'"')[::2])  # of strings
    return sum(map(outside.count, (b",", b"[", b"{")))


def _is_canonical(fields: Mapping[str, Any], raw: bytes) -> bool:
    """Whether raw is `_canonical(fields)`, which is not made whole for it."""
    end = 0
    for piece in CANONICAL.iterencode(fields):
        text = piece.encode()
        if not raw.startswith(text, end):
            return False
        end += len(text)
    return end == len(raw)


def _no_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {key!r} stands there twice")
        out[key] = value
    return out


def decode_manifest(raw: bytes) -> Manifest:
    """Raises Damaged unless the manifest is whole, consistent, and names nothing outside its own folder.

    Raises OtherFormat if it is whole and of another format: every format has `format` and this `checksum`.
    """
    if _values_in(raw) > MOST_VALUES:
        raise Damaged(f"{MANIFEST} holds more than {MOST_VALUES} values")
    try:
        fields = json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Damaged(f"{MANIFEST} is not a JSON object")
    checksum, version = fields.pop("checksum", None), fields.get("format")
    try:
        # The line of the checksum taken out, in which nothing else begins with one blank, it is over all the rest.
        rest = raw.replace(f'\n "checksum": "{checksum}",'.encode(), b"", 1)
        if checksum != sha256(rest).hexdigest() or not _is_canonical(fields, rest):
            raise Damaged(f"{MANIFEST} does not have its own checksum")
        if type(version) is int and version not in READABLE:
            raise OtherFormat(f"format {version}; {READS}")
        if type(version) is not int:
            raise Damaged(f"{MANIFEST} has format {version!r}; {READS}")
        manifest = Manifest.model_validate(fields)
    except (ValidationError, ValueError, RecursionError) as error:  # ValueError: lone surrogates, NaN
        raise Damaged(f"{MANIFEST} does not follow the format: {error}") from error
    for name in manifest.parts:
        if not PART_NAME.fullmatch(name):
            raise Damaged(f"{MANIFEST} names a part {name!r}, which is no part's name")
    if manifest.tensors_by_part.keys() != manifest.parts.keys():
        raise Damaged(f"{MANIFEST}: the parts and the tensors' parts differ")
    for name, part in manifest.parts.items():
        _check_part(name, part, manifest.tensors_by_part[name])
    if manifest.digest != digest_of(manifest.tensors):
        raise Damaged(f"{MANIFEST}: the digest is not that of the tensors")
    return manifest


def _check_part(name: str, part: PartInfo, tensors: Mapping[str, TensorInfo]) -> None:
    """Name and size follow from the tensors. Raises Damaged."""
    try:
        header = header_of(tensors)
        size = len(header) + sum(map(_size_of, tensors.values()))
    except (KeyError, ValueError) as error:  # a dtype or a name that no writer of ours has
        raise Damaged(f"{MANIFEST}: {name} holds a tensor that is none: {error}") from error
    if size != part.size or name != _part_name(name.rpartition("-")[0], header, tensors):
        raise Damaged(f"{MANIFEST}: {name} does not fit the tensors in it")
