"""A campaign of damage: more than a thousand ways to damage a snapshot, each of them found, told and survived.

`test_snapshot_damage.py` says what is told of each kind of damage. Here it is the number that counts: every region of
every kind of file, end to end, from the bytes on the disk to the older snapshot in memory.
"""

import json
import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from mingpt.snapshot.store import Store
from snapshot_kit import equal, read_newest, save, state_of

MANIFEST = "manifest.json"
Damage = tuple[str, str, dict[str, bytes | None]]  # its class, the file, and the new contents (None: removed)
chooser = random.Random(1)


def regions(name: str, content: bytes) -> dict[str, range]:
    """The kinds of bytes in a file: of a part its length, header and body; of a manifest each field, name and all."""
    if name != MANIFEST:
        end = 8 + int.from_bytes(content[:8], "little")
        return {"length": range(8), "header": range(8, end), "body": range(end, len(content))}
    found: dict[str, range] = {}
    starts = [(content.index(f'\n "{field}": '.encode()), field) for field in json.loads(content)]
    ends = [start for start, _ in sorted(starts)[1:]] + [len(content)]
    for (start, field), end in zip(sorted(starts), ends, strict=True):
        found[field] = range(start, end)
    return {"opening": range(sorted(starts)[0][0])} | found


def flips(name: str, content: bytes) -> Iterator[Damage]:
    for region, span in regions(name, content).items():
        bits = range(8 * span.start, 8 * span.stop)
        for bit in chooser.sample(bits, min(len(bits), 64)):
            bad = bytearray(content)
            bad[bit // 8] ^= 1 << bit % 8
            yield f"bit flipped in {region}", name, {name: bytes(bad)}


def truncations(name: str, content: bytes) -> Iterator[Damage]:
    edges = {0, *(span.start for span in regions(name, content).values()), len(content)}
    lengths = {edge + by for edge in edges for by in (-1, 0, 1)} | set(chooser.sample(range(len(content)), 24))
    for length in sorted(length for length in lengths if 0 <= length < len(content)):
        yield "truncated", name, {name: content[:length]}
        yield "a tail of zeros, as a power cut leaves it", name, {name: content[:length].ljust(len(content), b"\0")}


def others(good: dict[str, bytes], older: dict[str, bytes]) -> Iterator[Damage]:
    """Files that are whole, but missing, longer, or in the place of others."""
    parts, older_parts = sorted(good.keys() - {MANIFEST}), sorted(older.keys() - {MANIFEST})
    for name in parts:
        yield "removed", name, {name: None}
    for name, content in good.items():
        yield "longer", name, {name: content + b"\0"}
        yield "twice", name, {name: content * 2}
        yield "the bytes turned round", name, {name: content[::-1]}
    for name, of_older in zip(parts, older_parts, strict=True):
        yield "the older step's part", name, {name: older[of_older]}
    yield "parts swapped", "", {name: good[other] for name, other in zip(parts, reversed(parts), strict=True)}
    yield "the older step's manifest", MANIFEST, {MANIFEST: older[MANIFEST]}
    yield "the older step's folder", MANIFEST, dict.fromkeys(parts) | older
    yield "the older step's parts beside the manifest", "", dict.fromkeys(parts) | {n: older[n] for n in older_parts}
    yield (
        "the older step's manifest, each part under its name",
        MANIFEST,
        {
            MANIFEST: older[MANIFEST],
            **{of_older: good[name] for name, of_older in zip(parts, older_parts, strict=True)},
        },
    )


@pytest.mark.slow
def test_every_one_of_a_thousand_damaged_snapshots_is_found_and_the_older_one_read(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "snapshots"))
    save(store, 1)
    save(store, 2)
    folder = Path(store.folder(2))
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    older = {path.name: path.read_bytes() for path in Path(store.folder(1)).iterdir()}
    assert sorted(name.partition("-")[0] for name in good) == [MANIFEST, "model", "optimizer"]
    assert (whole := read_newest(store, pytest.fail))
    assert whole.manifest.step == 2

    damages = [d for name, content in good.items() for make in (flips, truncations) for d in make(name, content)]
    damages += others(good, older)
    seen, classes = set[str](), set[str]()
    unfound: list[tuple[str, str]] = []
    for kind, name, changes in damages:
        after = {n: c for n, c in (good | changes).items() if c is not None}
        fingerprint = sha256(repr(sorted(after.items())).encode()).hexdigest()
        if after == good or fingerprint in seen:  # a tail of zeros may be one already
            continue
        seen.add(fingerprint)
        classes.add(f"{kind}: {name.partition('-')[0]}")
        for path in folder.iterdir():
            path.unlink()
        for n, content in after.items():
            (folder / n).write_bytes(content)

        said: list[str] = []
        loaded = read_newest(store, said.append)
        aside = f"set-aside-{sha256(after[MANIFEST]).hexdigest()[:8]}-{MANIFEST}"
        after[aside] = after.pop(MANIFEST)
        if not (
            loaded
            and loaded.manifest.step == 1
            and equal(loaded.state, state_of(1))
            and len(said) == 1
            and said[0].startswith("DAMAGED SNAPSHOT of step 2 in ")
            and (name.removesuffix(".json") in said[0])
            and aside in said[0]
            and {path.name: path.read_bytes() for path in folder.iterdir()} == after  # nothing is lost
        ):
            unfound.append((kind, name))
    assert unfound == []
    assert len(seen) >= 1000
    assert len(classes) >= 30
    print(f"{len(seen)} damaged snapshots of {len(classes)} classes, all found")
