"""A hostile snapshot, its checksums and digest right as an attacker can make them, is damaged and nothing worse."""

import inspect
import json
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from mingpt.errors import Damaged
from mingpt.plainfile import open_file
from mingpt.snapshot.manifest import decode_manifest
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from snapshot_kit import digest_of, read_newest, save, signed


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two snapshots; the tests make step 3 hostile."""
    store = Store(str(tmp_path / "snapshots"))
    save(store, 2)
    save(store, 3)
    return store


def folder(store: Store) -> Path:
    return Path(store.folder(3))


def part_of(store: Store) -> Path:
    [path] = folder(store).glob("model-*.safetensors")
    return path


def is_damaged(store: Store, manifest: bytes) -> None:
    """And not any other error, which would end the attempt, and the next one, and the next."""
    (folder(store) / "manifest.json").write_bytes(manifest)
    with pytest.raises(Damaged):
        read(store, 3)
    loaded = read_newest(store, print)
    assert loaded
    assert loaded.manifest.step == 2


HASH = "0" * 16
BAD_NAMES = [
    "../secret.safetensors",
    f"../model-00001-{HASH}.safetensors",
    f"model-00001-{HASH}.safetensors/../../secret",
    f"./model-00001-{HASH}.safetensors",
    f"model-00001-{HASH}.safetensors\n",
    f"model-00001-{HASH}.safetensors\0",
    f"model-1-{HASH}.safetensors",
    f"model-0000١-{HASH}.safetensors",
    f"model-00001-{HASH.replace('0', 'A')}.safetensors",
    f"other-00001-{HASH}.safetensors",
    f"model-00001-{HASH}.pt",
    "manifest.json",
    "file:///etc/passwd",
    "/SECRET",
    "",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_no_parts_name_is_refused_and_nothing_outside_is_read(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    secret = tmp_path / "snapshots" / "secret.safetensors"
    content = part_of(store).read_bytes()
    secret.write_bytes(content)  # good content, so that the name alone can be the reason
    name = name.replace("/SECRET", str(secret))
    fields = json.loads(store.read_manifest(3))
    old = part_of(store).name
    fields["parts"][name] = fields["parts"].pop(old)
    for tensor in fields["tensors"].values():
        tensor["part"] = tensor["part"].replace(old, name)
    (folder(store) / "manifest.json").write_bytes(signed(fields))
    seen: list[str] = []

    def watched(path: str, *flags: int) -> int:
        seen.append(path)
        return open_file(path, *flags)

    monkeypatch.setattr("mingpt.plainfile.open_file", watched)
    with pytest.raises(Damaged) as damage:
        read(store, 3)
    assert str(damage.value) == f"manifest.json names a part {name!r}, which is not a part's name"
    assert seen == [f"{store.folder(3)}/manifest.json"]


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets `a/b` to a value; `*` is the first key."""

    def change(fields: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            fields = fields[next(iter(fields)) if key == "*" else key]
        fields[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed("format", True),
        changed("format", 1.0),
        changed("step", -1),
        changed("step", 3.0),
        changed("step", 10**30),
        changed("digest", "0" * 64),
        changed("digest", "0" * 64 + "\n"),
        changed("new", 1),
        changed("parts/*/new", 1),
        changed("parts/*/size", 0),
        changed("parts/*/size", 10**12),
        changed("parts/*/size", 10**18),
        changed("parts/*/size", 2**63),
        changed("parts/*/size", 10**30),
        changed("parts/*/sha256", "0" * 64),
        changed("parts", {}),
        changed(f"parts/model-00009-{HASH}.safetensors", {"size": 1}),
        changed("tensors", {}),
        changed("tensors/*/part", f"model-00009-{HASH}.safetensors"),
        changed("tensors/*/shape", [-1]),
        changed("tensors/*/shape", [4] * 9),
        changed("tensors/*/shape", [2, 2]),
        changed("tensors/*/shape", [4, 2**62]),
        changed("tensors/*/shape", [0, 2**62, 4]),
        changed("tensors/*/shape", [10**4000]),
        changed("tensors/*/dtype", "F32"),
        changed("tensors/*/dtype", "NOPE"),
        changed("tensors/*/dtype", "F8_E4M3"),  # safetensors knows it, and no writer of ours has it
        changed("tensors/*/dtype", "os.system"),
        changed("tensors/*/dtype", None),
        changed("tensors/*/sha256", "0" * 64),
        changed("config", None),
        changed("config/seed", float("nan")),
        changed("config/seed", float("-inf")),
        changed("history", {}),
        changed("metrics", None),
        changed("metrics/loss", "0.5"),
        changed("metrics/loss", True),
        changed("metrics/val_loss", float("nan")),
        changed("metrics/val_loss", 10**400),
        changed("metrics/new", 1.0),
    ],
)
def test_a_signed_manifest_that_lies_is_damaged(store: Store, change: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads(store.read_manifest(3))
    digest = fields["digest"]
    change(fields)
    if fields["digest"] == digest:  # unless it is what the change is about
        fields["digest"] = digest_of(fields["tensors"])
    is_damaged(store, signed(fields))


def test_the_signature_of_these_tests_is_accepted(store: Store) -> None:
    """Else all of them would pass for the checksum's sake."""
    fields = json.loads(store.read_manifest(3))
    fields["run"] = "other"
    (folder(store) / "manifest.json").write_bytes(signed(fields))
    assert read(store, 3).manifest.run == "other"


def test_a_tensor_of_another_part_is_damaged(store: Store) -> None:
    fields = json.loads(store.read_manifest(3))
    fields["tensors"]["b"]["part"] = fields["tensors"]["w.step"]["part"]
    is_damaged(store, signed(fields))


def test_thousands_of_parts_and_tensors_that_are_not_there_are_damaged(store: Store) -> None:
    fields = json.loads(store.read_manifest(3))
    names = [f"model-{i % 100000:05d}-{i:016x}.safetensors" for i in range(10_000)]
    fields["parts"] = {name: {"size": 1} for name in names}
    tensor = {"dtype": "F32", "shape": [0], "sha256": "0" * 64}
    fields["tensors"] = {f"t{i}": tensor | {"part": name} for i, name in enumerate(names)}
    fields["digest"] = digest_of(fields["tensors"])
    is_damaged(store, signed(fields))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"seed": null', b'"seed": NaN'),
        (b'"seed": null', b'"seed": -Infinity'),
        (b'"seed": null', b'"seed": 1e999'),
        (b'"seed": null', b'"seed": ' + b"9" * 5000),
        (b'"seed": null', b'"seed": "\\ud800"'),
        (b'"seed": null', b'"seed": null, "seed": null'),
        (b'"seed": null', b'"seed": nul'),
        (b'"run": "name"', b'"run": "name", "run": "name"'),
        (b'"run": "name"', b'"run": "\xff"'),
        (b"{", b"\xef\xbb\xbf{"),
    ],
)
def test_json_that_no_writer_of_ours_makes_is_damaged(store: Store, old: bytes, new: bytes) -> None:
    content = store.read_manifest(3)
    assert old in content
    is_damaged(store, content.replace(old, new, 1))


def test_a_manifest_of_zeros_as_a_power_cut_leaves_it_is_damaged(store: Store) -> None:
    is_damaged(store, bytes(1000))


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_of_any_depth_is_damaged(store: Store, opening: bytes, closing: bytes) -> None:
    """Parser, checksum and validation run out of stack at different depths: all around them are tried."""
    content = store.read_manifest(3)
    escaped: dict[int, str] = {}
    limit = sys.getrecursionlimit()
    # A small stack, which a nesting of 100 or so exhausts; the two large depths are for Pythons whose parser, being
    # written in C, does not look at this limit.
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        for depth in (*range(50, 160), 2_000, 100_000):
            try:
                decode_manifest(content.replace(b"null", opening * depth + b"1" + closing * depth))
            except Damaged:
                continue
            except BaseException as error:
                escaped[depth] = type(error).__name__
            else:
                escaped[depth] = "accepted"
    finally:
        sys.setrecursionlimit(limit)
    assert escaped == {}


def hostile_part(store: Store, header: bytes, data: bytes, dtype: str, shape: list[int]) -> bytes:
    """Writes a part with one tensor `a`, and gives the manifest that vouches for it, all of whose figures fit it."""
    raw = len(header).to_bytes(8, "little") + header + data
    digest = sha256(data).hexdigest()
    name = f"model-00001-{sha256(raw[: 8 + len(header)] + digest.encode()).hexdigest()[:16]}.safetensors"
    (folder(store) / name).write_bytes(raw)
    fields = json.loads(store.read_manifest(3))
    fields["parts"] = {name: {"size": len(raw)}}
    fields["tensors"] = {"a": {"dtype": dtype, "shape": shape, "sha256": digest, "part": name}}
    fields["digest"] = digest_of(fields["tensors"])
    return signed(fields)


def header(dtype: str, shape: list[int], end: int, name: str = "a") -> bytes:
    text = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}, separators=(",", ":"))
    return text.encode().ljust(-(-len(text) // 8) * 8)


def test_the_hostile_part_is_accepted_where_it_is_right(store: Store) -> None:
    (folder(store) / "manifest.json").write_bytes(hostile_part(store, header("F32", [1], 4), bytes(4), "F32", [1]))
    assert read(store, 3).state["model"]["a"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("head", "data", "dtype", "shape"),
    [
        (header("F32", [1], 4, name="b"), bytes(4), "F32", [1]),
        (header("F32", [1], 4), bytes(4), "I32", [1]),
        (header("F32", [1], 4), bytes(8), "F32", [1]),
        (header("F32", [2], 4), bytes(4), "F32", [2]),
        (header("F32", [1], 4).rstrip(), bytes(4), "F32", [1]),
        (header("F32", [1], 4) + b" " * 8, bytes(4), "F32", [1]),
        (header("F32", [2**62, 4], 0), b"", "F32", [2**62, 4]),
        (header("F32", [0, 2**62, 4], 0), b"", "F32", [0, 2**62, 4]),
        (header("F4", [4], 2), bytes(2), "F4", [4]),
        (header("F8_E8M0", [1], 1), bytes(1), "F8_E8M0", [1]),
        (header("U64", [1], 8), bytes(8), "U64", [1]),
        (b"", b"", "F32", [1]),
        (b"[" * 50_000, b"", "F32", [1]),
        (b" " * 100_000_000, bytes(4), "F32", [1]),
        (b"\x80\x04.", b"", "F32", [1]),  # the beginning of a pickle
    ],
)
def test_a_part_that_is_not_what_the_manifest_says_is_damaged(
    store: Store, head: bytes, data: bytes, dtype: str, shape: list[int]
) -> None:
    is_damaged(store, hostile_part(store, head, data, dtype, shape))


def test_a_part_whose_header_lies_under_a_right_name_is_damaged(store: Store) -> None:
    """The manifest is right; two tensors of the file overlap, one reaches past its end, one is not there."""
    [path] = folder(store).glob("model-*.safetensors")
    raw = path.read_bytes()
    for old, new in ((b"[24,32]", b"[20,28]"), (b"[24,32]", b"[24,99]"), (b'"b"', b'"c"'), (b"BF16", b"I16 ")):
        assert old in raw
        path.write_bytes(raw.replace(old, new))
        with pytest.raises(Damaged, match=f"^{path.name}: the header does not match the manifest$"):
            read(store, 3)
