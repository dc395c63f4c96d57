"""The format of a snapshot: its parts, the fields of its manifest, its digest. No I/O. Specified in docs/snapshots.md.

A snapshot holds two kinds of tensors: `model` (the module's state_dict: weights under Hugging Face's names, a user's
buffers) and `optimizer`. They are packed into parts (safetensors files) by sorted name and size alone, so any number of
processes writes the same parts.

The manifest lists the tensors of each part. A part's header, size and name follow from that list. So a reader compares
the header with the expected one and never parses it. Writer and reader hash each byte once.
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
from pydantic import Field
from torch import Tensor

from mingpt.compute.buckets import Sliced
from mingpt.config.section import Sha256, Strict
from mingpt.errors import Damaged

FORMAT = 3
# Small enough to share among processes, large enough that one request per part is cheap. Another value gives the same
# digest, but other names of parts: what an attempt writes again would not be the file that is there already.
PART_BYTES = 64 * 2**20
MANIFEST = "manifest.json"
VALIDATION = "validation"  # of an attempt's entry in the history: [samples that its evaluations take, of how many]
# Nothing else may be named by a manifest, which may be a stranger's: no path leads out of the step's folder.
PART_NAME = re.compile(r"(model|optimizer)-[0-9]{5}-[0-9a-f]{16}\.safetensors")
# safetensors' names. A dtype that is not here can't be in a model or an optimizer of a run.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

Kind = Literal["model", "optimizer"]
State = Mapping[Kind, Mapping[str, Tensor]]
SharedState = Mapping[Kind, Mapping[str, Tensor | Sliced]]  # with tensors of which each process has a slice


class PartInfo(Strict):
    size: int = Field(gt=0)


class TensorInfo(Strict):
    dtype: str  # one of DTYPES
    shape: list[Annotated[int, Field(ge=0)]] = Field(max_length=8)
    sha256: Sha256  # of its bytes
    part: str  # the name of the part that it is in


class Metrics(Strict):
    """The losses measured at the snapshot's step. They follow from (config, step), so they are not state."""

    loss: float | None = Field(default=None, allow_inf_nan=False)
    val_loss: float | None = Field(default=None, allow_inf_nan=False)
    best_val_loss: float | None = Field(default=None, allow_inf_nan=False)  # the lowest val_loss up to this step
    not_finite: list[str] = Field(default=[])  # names of the losses that were NaN or infinite

    @classmethod
    def of(cls, **measured: float | None) -> "Metrics":
        """None means not measured."""
        finite, not_finite = dict[str, float](), list[str]()
        for name, value in sorted(measured.items()):
            if value is None:
                continue
            if math.isfinite(value):
                finite[name] = value
            else:  # JSON has no NaN: Python's would be read by no other program
                not_finite.append(name)
        return cls(**finite, not_finite=not_finite)


class Manifest(Strict):
    """The fields of manifest.json, but for `checksum`, a hash of all the others, which manifest.py adds and checks.

    The digest covers the names, dtypes, shapes and hashes of `tensors`, and nothing else: not the step, not `part`.
    """

    format: int = FORMAT
    run: str  # the run's name
    step: int = Field(ge=0)
    digest: Sha256
    parts: dict[str, PartInfo]
    tensors: dict[str, TensorInfo]
    # What follows is not state. It is here so that a snapshot's URL alone is enough to go on, generate or export.
    vocabulary: dict[str, Any]
    config: dict[str, Any]  # without secrets
    fingerprint: dict[str, Any]  # what bits depend on besides config and step
    history: list[dict[str, Any]]  # an entry for each attempt that led here, the writer's last
    metrics: Metrics = Metrics()

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each part."""
        return {name: part.size for name, part in self.parts.items()}

    @property
    def attempt(self) -> int:
        """The number of the attempt that wrote this snapshot; 0 if the history has none."""
        number = self.history[-1].get("attempt") if self.history else None
        return number if isinstance(number, int) else 0

    @property
    def validated_on(self) -> tuple[Any, Any]:
        """What val_loss was measured on: the data's hash, and how many samples of how many, or None: not recorded."""
        samples = None
        for entry in self.history:
            counts = entry.get(VALIDATION)
            if isinstance(counts, list) and [*map(type, counts)] == [int, int]:  # a history may be a stranger's
                samples = counts
        return self.fingerprint.get("data"), samples

    def layout(self, kind: Kind) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each tensor of this kind."""
        return {
            name: (torch.Size(info.shape), TORCH_DTYPES[info.dtype])
            for name, info in self.tensors.items()
            if info.part.startswith(kind)
        }

    @cached_property
    def tensors_by_part(self) -> dict[str, dict[str, TensorInfo]]:
        parts: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self.tensors.items():
            parts.setdefault(info.part, {})[name] = info
        return parts


@dataclass(frozen=True)
class Part:
    """Which tensors go into one part, sorted by name."""

    kind: Kind
    number: int
    names: tuple[str, ...]


def lay_out(state: SharedState, part_bytes: int = PART_BYTES) -> list[Part]:
    """Pack the sorted tensors of each kind into parts of at most part_bytes. A larger tensor gets a part of its own."""
    parts: list[Part] = []
    for kind, tensors in sorted(state.items()):
        groups: list[list[str]] = []
        room = 0
        for name in sorted(tensors):  # by name and size alone: the world must not matter
            if not groups or tensors[name].nbytes > room:
                groups.append([])
                room = part_bytes
            groups[-1].append(name)
            room -= tensors[name].nbytes
        parts += [Part(kind, number, tuple(names)) for number, names in enumerate(groups, 1)]
    return parts


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def size_of(info: TensorInfo) -> int:
    """In bytes."""
    return math.prod(info.shape) * TORCH_DTYPES[info.dtype].itemsize


def _in_file_order(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Larger elements first, so that each tensor is aligned. safetensors uses the same order."""
    return sorted(tensors, key=lambda name: (-TORCH_DTYPES[tensors[name].dtype].itemsize, name))


def header_of(tensors: Mapping[str, TensorInfo]) -> bytes:
    """The part's bytes before its first tensor. Format: https://github.com/huggingface/safetensors#format."""
    header, end = dict[str, Any](), 0
    for name in _in_file_order(tensors):
        start, end = end, end + size_of(tensors[name])
        header[name] = {"dtype": tensors[name].dtype, "shape": tensors[name].shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Blanks, so that the first tensor is aligned in a file that is mapped into memory.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def part_name(stem: str, header: bytes, tensors: Mapping[str, TensorInfo]) -> str:
    """The stem (`model-00001`) and a hash of the part's content, computed from the header and the tensors' hashes."""
    # Not from the bytes: those have been hashed once for the manifest, and a second time would cost as much as writing.
    content = sha256(header + "".join(tensors[name].sha256 for name in _in_file_order(tensors)).encode())
    return f"{stem}-{content.hexdigest()[:16]}.safetensors"


@dataclass(frozen=True)
class EncodedPart:
    """A part as a file: its name, its bytes in order (not copied), and its tensors' entries in the manifest."""

    name: str
    pieces: list[bytes | memoryview]
    tensors: dict[str, TensorInfo]

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self.pieces)


def encode_part(part: Part, tensors: Mapping[str, Tensor]) -> EncodedPart:
    content = {name: tensors[name].detach().to("cpu").contiguous() for name in part.names}
    infos = dict[str, TensorInfo]()
    for n, t in content.items():
        checksum = sha256(_bytes_of(t)).hexdigest()
        infos[n] = TensorInfo(dtype=DTYPES[t.dtype], shape=list(t.shape), sha256=checksum, part="")
    header = header_of(infos)
    # The name has a hash of the content, so it is known only now.
    name = part_name(f"{part.kind}-{part.number:05d}", header, infos)
    infos = {n: info.model_copy(update={"part": name}) for n, info in infos.items()}
    return EncodedPart(name, [header, *(_bytes_of(content[n]) for n in _in_file_order(infos))], infos)


def verified(
    name: str, size: int, infos: Mapping[str, TensorInfo], pieces: Iterable[memoryview]
) -> Iterator[memoryview]:
    """Pass a part's bytes on while hashing them. Raises Damaged, at the latest after the last piece.

    size: in bytes. infos: the tensors' entries in the manifest.
    A piece may be passed on before its tensor's hash is complete: trust none of them until the iterator has ended.
    """
    header = header_of(infos)
    # The header is compared, not parsed: a parser would be one more thing that a stranger's file can attack.
    sections = [(len(header), sha256(header).hexdigest(), f"{name}: the header does not match the manifest")]
    for n in _in_file_order(infos):
        sections.append(
            (size_of(infos[n]), infos[n].sha256, f"{name}: {n} does not match its checksum in the manifest")
        )
    sections.append((2**63, "", ""))  # never full
    following = iter(sections)
    left, checksum, problem = next(following)  # left: bytes of this section that are still to come
    found, end = sha256(), 0
    for piece in pieces:
        rest = piece
        while len(rest) >= left:  # this piece has the section's last byte
            found.update(rest[:left])
            if found.hexdigest() != checksum:
                raise Damaged(problem)
            rest = rest[left:]
            left, checksum, problem = next(following)
            found = sha256()
        found.update(rest)
        left -= len(rest)
        end += len(piece)
        yield piece
    if end != size:
        raise Damaged(f"{name} has {end} bytes in place of {size}")


def decode_part(manifest: Manifest, name: str, raw: memoryview) -> dict[str, Tensor]:
    """The tensors of a part, verified against the manifest; they share `raw`'s memory. Raises Damaged."""
    infos = manifest.tensors_by_part[name]
    for _ in verified(name, manifest.parts[name].size, infos, [raw]):
        pass
    tensors, start = dict[str, Tensor](), len(header_of(infos))
    for n in _in_file_order(infos):
        dtype, end = TORCH_DTYPES[infos[n].dtype], start + size_of(infos[n])
        # frombuffer refuses no bytes at all, as of a tensor with a 0 in its shape.
        flat = torch.frombuffer(raw[start:end], dtype=dtype) if end > start else torch.empty(0, dtype=dtype)
        tensors[n] = flat.view(infos[n].shape)
        start = end
    return tensors


def digest_of(tensors: Mapping[str, TensorInfo]) -> str:
    """sha256 over the sorted lines `name dtype shape sha256`: equal digests mean equal training state."""
    # Tensors alone, and not the parts: it must not depend on how they are packed.
    lines = sorted(f"{name} {t.dtype} {json.dumps(t.shape)} {t.sha256}\n" for name, t in tensors.items())
    return sha256("".join(lines).encode()).hexdigest()
