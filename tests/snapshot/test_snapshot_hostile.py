"""A hostile snapshot, its checksums and digest right as an attacker can make them, is damaged and nothing worse.

It costs a reader little memory, whatever it promises.
"""

import inspect
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from mingpt.errors import Damaged, UserError
from mingpt.snapshot import manifest as manifest_module
from mingpt.snapshot.manifest import decode_manifest, encode_manifest
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from tests.kits.snapshot_kit import digest_of, save, signed

HASH, MIB = "0" * 16, 2**20


@pytest.fixture
def store(store: Store) -> Store:
    """The tests make step 3 hostile."""
    save(store, 3)
    return store


def is_damaged(store: Store, manifest: bytes) -> None:
    """And not any other error, which would end the attempt, and the next one, and the next."""
    Path(store.folder(3), "manifest.json").write_bytes(manifest)
    with pytest.raises(Damaged):
        read(store, 3)


@pytest.mark.parametrize(
    "name",
    [
        f"../model-00001-{HASH}.safetensors",
        f"model-00001-{HASH}.safetensors/../../secret",
        f"model-00001-{HASH}.safetensors\n",
        f"model-0000١-{HASH}.safetensors",
        f"other-00001-{HASH}.safetensors",
        f"model-00001-{HASH}.pt",
        "",
    ],
)
def test_a_name_that_is_no_parts_name_is_refused_before_anything_is_opened(store: Store, name: str) -> None:
    text = store.read_manifest(3).decode()
    old = next(iter(json.loads(text)["parts"]))
    fields = json.loads(text.replace(json.dumps(old), json.dumps(name)))
    assert name in fields["parts"]
    with pytest.raises(Damaged) as damage:
        decode_manifest(signed(fields))
    assert repr(name) in str(damage.value)


# A key of the manifest (`*`: the first one), and what it must not be.
LIES: dict[str, tuple[Any, ...]] = {
    "format": (True, 1.0),
    "step": (-1, 3.0),
    "digest": ("0" * 64, "0" * 64 + "\n"),
    "new": (1,),
    "parts": ({},),
    "parts/*/new": (1,),
    "parts/*/size": (0, 10**12, 2**63),
    f"parts/model-00009-{HASH}.safetensors": ({"size": 1},),
    "tensors": ({},),
    "tensors/*/part": (f"model-00009-{HASH}.safetensors",),
    "tensors/*/shape": ([-1], [4] * 9, [2, 2], [4, 2**62], [10**4000]),
    "tensors/*/dtype": ("F32", "F8_E4M3", None),  # safetensors knows the second, no writer of ours has it
    "tensors/*/sha256": ("0" * 64,),
    "config/seed": (float("nan"),),
    "history": ({},),
    "metrics/loss": ("0.5", True),
    "metrics/val_loss": (float("nan"), 10**400),
    "metrics/new": (1.0,),
}


@pytest.mark.parametrize("path", LIES)
def test_a_signed_manifest_that_lies_is_damaged(store: Store, path: str) -> None:
    content = store.read_manifest(3)
    for lie in LIES[path]:
        fields = place = json.loads(content)
        *parents, last = path.split("/")
        for key in parents:
            place = place[next(iter(place)) if key == "*" else key]
        place[last] = lie
        if path != "digest":
            fields["digest"] = digest_of(fields["tensors"])
        is_damaged(store, signed(fields))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"seed": null', b'"seed": 1e999'),
        (b'"seed": null', b'"seed": "\\ud800"'),
        (b'"seed": null', b'"seed": null, "seed": null'),
        (b'"run": "name"', b'"run": "\xff"'),
        (b"{", b"\xef\xbb\xbf{"),
    ],
)
def test_json_that_no_writer_of_ours_makes_is_damaged(store: Store, old: bytes, new: bytes) -> None:
    """Not by its checksum alone, which is right."""
    first, _, others = store.read_manifest(3).split(b"\n", 2)  # the checksum has the second line
    rest = first + b"\n" + others
    assert old in rest
    rest = rest.replace(old, new, 1)
    is_damaged(store, rest.replace(b"\n", b'\n "checksum": "%s",\n' % sha256(rest).hexdigest().encode(), 1))


@pytest.mark.parametrize("around", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_nesting_of_any_depth_is_a_value_or_damaged(store: Store, around: Callable[[Any], Any]) -> None:
    """Parser, checksum and validation run out of stack at different depths: all around them are tried."""
    fields, nested, contents = json.loads(store.read_manifest(3)), None, [b"[" * 100_000]
    for _ in range(160):
        nested = around(nested)
        contents.append(signed(fields | {"config": {"seed": nested}}))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        for content in contents:
            with suppress(Damaged):
                decode_manifest(content)
    finally:
        sys.setrecursionlimit(limit)


def test_values_are_counted_before_they_are_parsed_and_marks_inside_a_text_are_none(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer.json is full of such marks, and of quotes."""
    monkeypatch.setattr(manifest_module, "MOST_VALUES", 999)
    for raw in (b'{"a":[' + b"[]," * 999 + b"[]]}", b'{"' + b'":"' * 1998, b"[" * 1000):
        with pytest.raises(Damaged, match="more than 999"):
            decode_manifest(raw)
    text = '{"a\\\\": [1, 2], "\\"": {}},\n' * 400
    fields = json.loads(store.read_manifest(3)) | {"vocabulary": {"characters": text}}
    assert decode_manifest(signed(fields)).vocabulary["characters"] == text


def test_a_manifest_that_no_reader_would_take_is_not_written_and_gpt2_xl_fits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would write snapshots for days that are set aside when they are needed."""
    manifest = decode_manifest(store.read_manifest(3))
    names = [f"transformer.h.{i % 48}.{i}.exp_avg_sq" for i in range(4 * 580)]
    of_xl = manifest.model_copy(update={"tensors": dict.fromkeys(names, manifest.tensors["w"])})
    assert len(encode_manifest(of_xl)) < MIB
    monkeypatch.setattr(manifest_module, "MOST_VALUES", 999)
    monkeypatch.setattr(manifest_module, "MANIFEST_LIMIT", MIB)
    for vocabulary in ({"text": "a" * MIB}, {"list": [0] * 1000}):
        with pytest.raises(UserError, match="vocabulary"):
            encode_manifest(manifest.model_copy(update={"vocabulary": vocabulary}))


RIGHT = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  '


@pytest.mark.parametrize(
    ("head", "size", "dtype", "shape"),
    [
        (RIGHT, 4, "F32", [1]),  # only what follows is wrong
        (RIGHT, 4, "I32", [1]),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}  ', 4, "F32", [2]),
        (b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}      ', 0, "F32", [2**62, 4]),
        (b"[" * 2_000, 0, "F32", [1]),
        (b"\x80\x04.", 0, "F32", [1]),  # the beginning of a pickle
    ],
)
def test_a_part_that_is_not_what_the_manifest_says_is_damaged(
    store: Store, head: bytes, size: int, dtype: str, shape: list[int]
) -> None:
    """A part with one tensor `a`, and a manifest that vouches for it, all of whose figures fit it."""
    raw = len(head).to_bytes(8, "little") + head + bytes(size)
    digest = sha256(bytes(size)).hexdigest()
    name = f"model-00001-{sha256(raw[: 8 + len(head)] + digest.encode()).hexdigest()[:16]}.safetensors"
    Path(store.folder(3), name).write_bytes(raw)
    fields = json.loads(store.read_manifest(3)) | {"parts": {name: {"size": len(raw)}}}
    fields["tensors"] = {"a": {"dtype": dtype, "shape": shape, "sha256": digest, "part": name}}
    fields["digest"] = digest_of(fields["tensors"])
    if (head, size, dtype) == (RIGHT, 4, "F32"):
        Path(store.folder(3), "manifest.json").write_bytes(signed(fields))
        assert read(store, 3).state["model"]["a"].tolist() == [0.0]
    else:
        is_damaged(store, signed(fields))
