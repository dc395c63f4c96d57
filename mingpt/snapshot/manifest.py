"""manifest.json as bytes: canonical JSON with a checksum. What is read may be damaged, or made by an attacker."""

import json
import math
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from pydantic import ValidationError

from mingpt.cli.redact import redacted, without_secrets
from mingpt.errors import Damaged, OtherFormat, UserError
from mingpt.snapshot.format import (
    FORMAT,
    MANIFEST,
    PART_NAME,
    Manifest,
    PartInfo,
    TensorInfo,
    digest_of,
    header_of,
    part_name,
    size_of,
)

# A reader takes no larger manifest into memory. The largest tokenizer.json (Gemma 3's, 33 MB) makes a manifest of
# 38 MB, and gpt2-xl's tensors add 0.6 MB.
MANIFEST_LIMIT = 48 * 2**20
MOST_VALUES = 500_000  # JSON values in a manifest; a reader needs some 300 bytes for each; gpt2-xl has 19,000
MOST_ELEMENTS = 2**48  # of a tensor; far below the shapes that overflow torch's arithmetic

CANONICAL = json.JSONEncoder(sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return CANONICAL.encode(fields).encode()


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON with a checksum over all other fields. Raises UserError if readers would refuse it for its size."""
    fields = _clean(manifest.model_dump())
    raw = _canonical(fields | {"checksum": sha256(_canonical(fields)).hexdigest()})
    if len(raw) > MANIFEST_LIMIT or _count_values(raw) > MOST_VALUES:
        raise UserError(
            f"the snapshot's {MANIFEST} would have {len(raw)} bytes and {_count_values(raw)} values; readers take "
            f"{MANIFEST_LIMIT} and {MOST_VALUES}: take a smaller vocabulary (data.tokenizer), or fewer tensors"
        )
    return raw


def _clean(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields without secrets, when a manifest is written, and when it is read: another program may have made it.

    Not those of environment variables: two processes must read the same, and may have other variables. A fork's parent
    and changed settings stand in the history.
    """
    removed = {"config": without_secrets, "history": redacted}
    return fields | {name: remove(fields[name], False) for name, remove in removed.items() if name in fields}


def decode_manifest(raw: bytes) -> Manifest:
    """Raises Damaged unless the manifest is whole, consistent, and names nothing outside its own folder.

    Raises OtherFormat for a whole manifest of a format that this version does not read. Every format has the fields
    `format` and `checksum`.
    """
    manifest = _parse(raw)
    for name in manifest.parts:
        if not PART_NAME.fullmatch(name):
            raise Damaged(f"{MANIFEST} names a part {name!r}, which is not a part's name")
    if manifest.tensors_by_part.keys() != manifest.parts.keys():
        raise Damaged(f"{MANIFEST}: `parts` and the parts that `tensors` names differ")
    for name, part in manifest.parts.items():
        _check_part(name, part, manifest.tensors_by_part[name])
    if manifest.digest != digest_of(manifest.tensors):
        raise Damaged(f"{MANIFEST}: the digest does not match the tensors")
    return manifest


def _parse(raw: bytes) -> Manifest:
    if _count_values(raw) > MOST_VALUES:
        raise Damaged(f"{MANIFEST} holds more than {MOST_VALUES} values")
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Damaged(f"{MANIFEST} is not a JSON object")
    checksum, version = fields.pop("checksum", None), fields.get("format")
    reads = f"this version of mingpt reads {FORMAT}"
    try:
        # The checksum covers the text without its own line. No other line begins with one blank and this name.
        rest = raw.replace(f'\n "checksum": "{checksum}",'.encode(), b"", 1)
        if checksum != sha256(rest).hexdigest() or not _is_canonical(fields, rest):
            raise Damaged(f"{MANIFEST} does not match its own checksum")
        if type(version) is not int:
            raise Damaged(f"{MANIFEST} has format {version!r}; {reads}")
        if version != FORMAT:
            raise OtherFormat(f"format {version}; {reads}")
        return Manifest.model_validate(_clean(fields))
    except (ValidationError, ValueError, RecursionError) as error:  # ValueError: lone surrogates, NaN
        raise Damaged(f"{MANIFEST} does not follow the format: {error}") from error


def _count_values(raw: bytes) -> float:
    """About how many values a JSON text holds, without parsing it: parsed, it may take thirty times the memory."""
    outside = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if outside.count(b'"') > 4 * MOST_VALUES:
        return math.inf
    outside = b"".join(outside.split(b'"')[::2])  # what is outside of strings
    return sum(map(outside.count, (b",", b"[", b"{")))


def _is_canonical(fields: Mapping[str, Any], raw: bytes) -> bool:
    """Whether raw equals `_canonical(fields)`, and so has no key twice; compared piece by piece to save memory."""
    end = 0
    for piece in CANONICAL.iterencode(fields):
        text = piece.encode()
        if not raw.startswith(text, end):
            return False
        end += len(text)
    return end == len(raw)


def _check_part(name: str, part: PartInfo, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise Damaged unless the part's name and size are those that follow from its tensors."""
    try:
        for info in tensors.values():  # a tensor without bytes may have any shape
            if math.prod(max(1, n) for n in info.shape) > MOST_ELEMENTS:
                raise ValueError(f"the shape {info.shape} is too large")
        header = header_of(tensors)
        size = len(header) + sum(map(size_of, tensors.values()))
    except (KeyError, ValueError) as error:  # KeyError: an unknown dtype; ValueError: also a name that is not UTF-8
        raise Damaged(f"{MANIFEST}: {name} lists an invalid tensor: {error}") from error
    if size != part.size or name != part_name(name.rpartition("-")[0], header, tensors):
        raise Damaged(f"{MANIFEST}: {name} does not fit the tensors in it")
