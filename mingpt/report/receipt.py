"""A run's receipt: what it was computed from, by whom, and with which bits, as a chain of hashes in one JSON file.

Each entry holds the hash of the one before it, so the last hash stands for all of them: whoever keeps or signs that one
has kept all. Nothing is secret, and anybody can make a chain: what proves it is to compute the intervals again.
"""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import mingpt
from mingpt.command import Unfit
from mingpt.errors import UserError
from mingpt.observe.ledger import Account, accounts
from mingpt.redact import without_secrets
from mingpt.train.past import Past, Stretch
from mingpt.train.resume import changed

FORMAT = 1
LARGEST = 1 << 28  # bytes of a receipt that is read
FIRST = "0" * 64  # before the first entry

Entry = dict[str, Any]


def entries(past: Past, last: int | None = None) -> list[Entry]:
    """What is known of the run's steps up to its last kept snapshot (or `last`), without hashes."""
    kept = [step for step in past.steps if past.is_on_line(step) and (last is None or step <= last)]
    if not kept and last is None:
        raise UserError(
            f"{past.url}: no snapshot is kept, so a receipt would prove nothing: give a run that has one, and "
            f"--snapshots if the run has set snapshot.dir"
        )
    end = kept[-1] if last is None else last
    found: list[Entry] = [code()]
    account = {known.attempt: known for known in accounts(past.folder)}
    for stretch in past.stretches:
        if stretch.first > end:
            break
        found += [_attempt(stretch, account.get(stretch.attempt)), _trace(past, stretch, end)]
        until = end if stretch.last is None else min(end, stretch.last)
        for step in kept:
            if stretch.first <= step <= until and (manifest := past.manifest(step)):
                found.append({"what": "snapshot", "step": step, "digest": manifest.digest})
    return found


def code() -> Entry:
    """The code that makes the receipt. That of each attempt is known by its fingerprint."""
    folder, content = Path(mingpt.__file__).parent, sha256()
    for path in sorted(folder.rglob("*.py")):
        content.update(f"{path.relative_to(folder).as_posix()} {sha256(path.read_bytes()).hexdigest()}\n".encode())
    return {
        "what": "code",
        "mingpt": mingpt.__version__,
        "numerics": mingpt.NUMERICS,
        "source_sha256": content.hexdigest(),
    }


def _attempt(stretch: Stretch, account: Account | None) -> Entry:
    return {
        "what": "attempt",
        "attempt": stretch.attempt,
        "first": stretch.first,
        "processes": stretch.world_size,
        "host": account.host if account else None,
        "device": account.device if account else None,
        "data_sha256": stretch.numerics.get("data"),
        "fingerprint": stretch.numerics,
        "config": without_secrets(dict(stretch.config)),
    }


def _trace(past: Past, stretch: Stretch, end: int) -> Entry:
    """Of the steps that the run kept of it: a later attempt may have gone back before its end."""
    last = end if stretch.last is None else min(end, stretch.last)
    found = past.trace.get(stretch.attempt)
    rows = None if found is None else found[(found["step"] >= stretch.first) & (found["step"] <= last)]
    return {
        "what": "trace",
        "attempt": stretch.attempt,
        "last": last,
        "records": 0 if rows is None else len(rows),
        "sha256": None if rows is None else sha256(rows.tobytes()).hexdigest(),
    }


def chained(found: Sequence[Entry]) -> list[Entry]:
    out, before = list[Entry](), FIRST
    for entry in found:
        linked = entry | {"before": before}
        before = sha256(_canonical(linked)).hexdigest()
        out.append(linked | {"hash": before})
    return out


def encode(found: Sequence[Entry]) -> str:
    return json.dumps({"receipt": FORMAT, "entries": chained(found)}, indent=1, sort_keys=True, allow_nan=False)


def decode(raw: bytes) -> list[Entry]:
    """The entries of a receipt, without their hashes. Raises Unfit, naming the first entry that was changed."""
    try:
        content = json.loads(raw)
        linked = content["entries"]
        if content["receipt"] != FORMAT:
            raise UserError(f"a receipt of format {content['receipt']!r}: this version reads {FORMAT}")
        before, out = FIRST, list[Entry]()
        for number, entry in enumerate(linked, 1):
            plain = {key: value for key, value in entry.items() if key != "hash"}
            if entry["before"] != before or entry["hash"] != sha256(_canonical(plain)).hexdigest():
                raise Unfit(f"entry {number} ({name(entry)}) does not have its hash: the receipt was changed")
            before = entry["hash"]
            out.append({key: value for key, value in plain.items() if key != "before"})
        if raw.decode().strip() != encode(out):
            raise Unfit("the receipt is not as this program writes it: it was changed outside of its entries")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unfit(f"this is no receipt, or it was changed: {type(error).__name__}: {error}") from error
    return out


def compare(told: Sequence[Entry], past: Past) -> tuple[list[str], list[str]]:
    """(what in the run is other than the receipt says, what can't be compared), a line each."""
    kept: list[Any] = [e.get("step") for e in told if e.get("what") == "snapshot"]
    ends: list[Any] = [e.get("last") for e in told if e.get("what") == "trace"]
    if not kept or not ends or any(type(n) is not int for n in [*kept, *ends]) or max(kept) != max(ends):
        raise Unfit("the receipt does not end with a snapshot, as each receipt that this program writes does")
    wrong, notes = list[str](), list[str]()
    try:
        past.check_step(max(ends))
    except UserError as error:
        wrong.append(str(error))
    now = {name(e): e for e in entries(past, max(ends))}
    if [n for n in map(name, told) if n in now] != [n for n in now if n in {*map(name, told)}]:
        wrong.append("its entries are in another order, or are there twice")
    for entry in told:
        found = now.pop(name(entry), None)
        if found is None and entry.get("what") == "snapshot":
            notes.append(f"{name(entry)}: the run no longer has it")
        elif found is None:
            wrong.append(f"{name(entry)}: the run has none")
        else:
            for which, lines in zip((wrong, notes), _differences(entry, found), strict=True):
                which += [f"{name(entry)}: {', '.join(lines)}"] if lines else []
    wrong += [f"{which}: the receipt does not have it" for which in now if not which.startswith("snapshot")]
    notes += [f"{which}: the receipt does not have it" for which in now if which.startswith("snapshot")]
    return wrong, notes


def _differences(told: Entry, found: Entry) -> tuple[list[str], list[str]]:
    """(what is wrong, what is only other) in an entry that both have.

    Once an attempt's own snapshots are gone, those of later ones tell its config, and of the keys that do not affect
    the result they have later values.
    """
    keys = [key for key in sorted(told.keys() | found.keys()) if told.get(key) != found.get(key)]
    lines = [f"{key} is another one" for key in keys]
    if told["what"] == "code":
        return [], lines
    ours, theirs = found.get("config"), told.get("config")
    if keys != ["config"] or not isinstance(ours, dict) or not isinstance(theirs, dict) or theirs.keys() != ours.keys():
        return lines, []
    if any(type(theirs[section]) is not type(ours[section]) for section in ours) or changed(theirs, ours):
        return lines, []
    return [], ["config is another one, in keys that do not affect the result"]


def name(entry: Any) -> str:
    """`snapshot 200`, `attempt 2`."""
    fields = entry if isinstance(entry, Mapping) else {}
    number = fields.get("step", fields.get("attempt", ""))
    return re.sub(r"[^a-z0-9 ]", "?", f"{fields.get('what', 'entry')} {number}".strip())[:60]


def _canonical(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
