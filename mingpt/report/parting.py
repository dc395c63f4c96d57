"""Where two runs parted: settings, data, code and numerics, the first step with other bits, the first other tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mingpt.cli.console import complain
from mingpt.compute.numerics import changes
from mingpt.config.affecting import settings
from mingpt.errors import UserError
from mingpt.history.history import History, numerics_of
from mingpt.observe.trace import RECORD, Records
from mingpt.snapshot.attempts import Parent, new_named
from mingpt.snapshot.format import Manifest, TensorInfo
from mingpt.snapshot.reader import damage_as, read_parts
from mingpt.snapshot.store import Store

CODE = ("mingpt", "torch", "cuda", "triton", "tokenizers", "code", "imports", "own")  # of a fingerprint
OF_EACH_RUN = ("run.", "snapshot.", "resume.", "launch.")
NO_RECORDS: Records = np.empty(0, RECORD)


@dataclass(frozen=True)
class Side:
    """One of two. snapshots: the manifests that are compared, by step. trace: the bits of steps that are compared.

    step: it is one snapshot, which the user has named. past: it follows the attempt, if it is one attempt.
    """

    past: History
    snapshots: dict[int, Manifest]
    trace: Records
    step: int | None = None

    @property
    def url(self) -> str:
        return self.past.folder if self.past.attempt is None else f"{self.past.folder}, attempt {self.past.attempt}"

    @property
    def newest(self) -> Manifest | None:
        return self.snapshots[max(self.snapshots)] if self.snapshots else None

    @property
    def numerics(self) -> Mapping[str, Any] | None:
        """The newest snapshot's fingerprint; without a snapshot, what a later attempt says of this one."""
        if self.newest:
            return self.newest.fingerprint
        return numerics_of(self.past.entries.get(self.past.attempt or 0, {})) or None


def side(url: str, step: int | None = None, attempt: int | None = None) -> Side:
    """A run, of it one snapshot, or one attempt. Raises UserError if there is nothing of that."""
    past = History.open(url, attempt)
    if attempt is not None:  # with its snapshots that were set aside because a rewind or another attempt came
        every = [*past.set_aside(overtaken=True), *past.manifests.values()]
        for problem in past.damaged:
            complain(f"{past.folder}: {problem}")
        return Side(past, {m.step: m for m in every if m.attempt == attempt}, past.trace.get(attempt, NO_RECORDS))
    kept = np.concatenate([NO_RECORDS, *past.kept_trace.values()])
    trace = kept[np.argsort(kept["step"], kind="stable")]
    if step is None:
        return Side(past, past.manifests, trace)
    if step not in past.manifests:
        raise UserError(f"{past.folder}: no snapshot of step {step}; there are {', '.join(map(str, past.manifests))}")
    return Side(past, {step: past.manifests[step]}, trace, step)


@dataclass(frozen=True)
class TensorDifference:
    """values: how many there are; differ: how many of them differ; at: where the two are that are furthest apart, and
    both of them. None: why it can't be told.
    """

    name: str
    dtype: str
    values: int
    differ: int | None = None
    at: tuple[list[int], str, str] | None = None
    why: str = ""


@dataclass
class Parting:
    """forked: the parent, if one of the two, `fork`, was forked from the other.

    config, others: by key both values; of those that affect the result, and of the rest. steps: in both traces. step,
    bits: the first of them whose bits differ, by name with both values. common: snapshots of the same step. equal,
    snapshot: the last one before the first that differs, and that one's steps. tensors: how many of it differ, of how
    many.
    """

    a: str
    b: str
    forked: Parent | None = None
    fork: str = ""
    settings_known: bool = False
    numerics_known: bool = False
    config: dict[str, list[Any]] = field(default_factory=dict)
    others: dict[str, list[Any]] = field(default_factory=dict)
    data: list[str | None] = field(default_factory=lambda: [None, None])
    code: list[str] = field(default_factory=list)
    numerics: list[str] = field(default_factory=list)
    steps: int = 0
    step: int | None = None
    bits: dict[str, list[float]] = field(default_factory=dict)
    common: int = 0
    equal: int | None = None
    snapshot: list[int] | None = None
    tensor: TensorDifference | None = None
    tensors: tuple[int, int] = (0, 0)

    @property
    def differs(self) -> bool:
        other_data = self.data[0] != self.data[1]
        return bool(self.config or other_data or self.code or self.numerics or self.step or self.snapshot)


def parting(a: Side, b: Side) -> Parting:
    found = Parting(a.url, b.url)
    for one, other in ((a, b), (b, a)):
        if one.past.is_fork_of(other.past):
            found.forked, found.fork = one.past.parent, one.url
    if a.newest and b.newest:
        _compare_settings(found, a.newest, b.newest)
    if a.numerics is not None and b.numerics is not None:
        _compare_numerics(found, a.numerics, b.numerics)
    _compare_traces(found, a.trace, b.trace)
    _compare_snapshots(found, a, b)
    return found


def _compare_settings(found: Parting, a: Manifest, b: Manifest) -> None:
    (old, affecting_old), (new, affecting_new) = _settings(a), _settings(b)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key) and not key.startswith(OF_EACH_RUN):
            matters = key in affecting_old | affecting_new
            (found.config if matters else found.others)[key] = [old.get(key), new.get(key)]
    found.settings_known = True


def _settings(manifest: Manifest) -> tuple[dict[str, Any], set[str]]:
    """What `settings` returns. A fork that has not trained has its parent's config, and its changes in its history."""
    values, affecting = settings(manifest.config)
    planned = manifest.history[-1].get("changes") if new_named(manifest) else None
    if isinstance(planned, dict):
        values |= {key: pair[1] for key, pair in planned.items() if isinstance(pair, list) and len(pair) == 2}
    return values, affecting


def _compare_numerics(found: Parting, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    found.data = [text if isinstance(text := numerics.get("data"), str) else None for numerics in (a, b)]
    for keys, lines in ((CODE, found.code), ((a.keys() | b.keys()) - {"data", *CODE}, found.numerics)):
        lines += changes(*({k: v for k, v in numerics.items() if k in keys} for numerics in (a, b)))[0]
    found.numerics_known = True


def _compare_traces(found: Parting, a: Records, b: Records) -> None:
    common, in_a, in_b = np.intersect1d(a["step"], b["step"], return_indices=True)
    found.steps = len(common)
    raw = [np.ascontiguousarray(t[i]).view(np.uint8).reshape(-1, RECORD.itemsize) for t, i in ((a, in_a), (b, in_b))]
    if len(other := np.flatnonzero((raw[0] != raw[1]).any(1)) if len(common) else common):
        first = other[0]
        pairs = {name: [float(a[in_a[first]][field]), float(b[in_b[first]][field])]
                 for name, field in (("loss", "loss"), ("gradient norm", "norm"))}  # fmt: skip
        found.step, found.bits = int(common[first]), pairs


def _compare_snapshots(found: Parting, a: Side, b: Side) -> None:
    pairs = (
        [(max(a.snapshots), max(b.snapshots))]
        if a.step and b.step  # they may be of two steps
        else [(s, s) for s in sorted(a.snapshots.keys() & b.snapshots)]
    )
    found.common = len(pairs)
    for i, j in pairs:
        one, other = a.snapshots[i], b.snapshots[j]
        if one.digest == other.digest:
            found.equal = i
            continue
        found.snapshot = [i, j]
        parted = differing(one.tensors, other.tensors)
        found.tensors = len(parted), len(one.tensors.keys() | other.tensors.keys())
        found.tensor = _difference(parted[0], (a.past.store, one), (b.past.store, other))
        return


def differing(a: Mapping[str, TensorInfo], b: Mapping[str, TensorInfo]) -> list[str]:
    """The names of the tensors with other content."""

    def content_of(info: TensorInfo | None) -> tuple[Any, ...] | None:
        return (info.dtype, info.shape, info.sha256) if info else None

    return [name for name in sorted(a.keys() | b.keys()) if content_of(a.get(name)) != content_of(b.get(name))]


def _difference(name: str, *sides: tuple[Store, Manifest]) -> TensorDifference:
    infos = [manifest.tensors.get(name) for _, manifest in sides]
    shown = " and ".join(f"{i.dtype} {i.shape}" if i else "is not there" for i in infos)
    one, other = infos
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return TensorDifference(name, one.dtype if one else "", 0, why=shown)
    tensors = []
    for store, manifest in sides:
        part = manifest.tensors[name].part
        with damage_as(UserError, store, manifest.step, ": verify that run's snapshots"):
            tensors.append(dict(read_parts(store, manifest, [part]))[part][1][name])
    return measured(name, one.dtype, *tensors)


def measured(name: str, dtype: str, a: torch.Tensor, b: torch.Tensor) -> TensorDifference:
    """How many values of two tensors of one type and shape have other bits, and which two are furthest apart."""
    flat = [t.contiguous().flatten() for t in (a, b)]
    bits = [t.view(torch.uint8).view(len(t), -1) for t in flat]
    where = (bits[0] != bits[1]).any(1).nonzero().flatten()
    one, other = (t[where].double() for t in flat)
    furthest = int(where[(one - other).abs().nan_to_num(torch.inf).argmax()])
    place = [int(i) for i in np.unravel_index(furthest, tuple(a.shape))]
    values = [str(t[furthest].item()) for t in flat]
    return TensorDifference(name, dtype, a.numel(), len(where), (place, values[0], values[1]))
