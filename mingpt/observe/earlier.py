"""Steps that an earlier attempt has computed, too: they must have the same bits.

Each attempt's metrics begin with a name for all that its bits follow from; attempts with the same name are compared.
"""

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any

from mingpt.config.affecting import settings
from mingpt.config.schema import Config
from mingpt.observe.events import AttemptEnded, AttemptFailed, BitsDiffer, Event, StepComputed, StepDone
from mingpt.observe.jsonl import rows_of
from mingpt.redact import without_secrets
from mingpt.snapshot.attempts import RunRecord, records, segments

FIELD = "equality"  # of a row of the metrics that has no step: the attempt's name
LOOK_BACK = 16  # attempts; a step that is computed again was computed by one of the last
LIMIT_SECONDS = 5.0  # at the end, for reading what the attempts before have recorded
Figures = tuple[float | None, float | None]  # loss and gradient norm; None: not finite


def recorded(run_dir: str, attempt: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The rows of the LOOK_BACK attempts before this one, by number."""
    paths = segments(run_dir)
    for number in sorted(n for n in paths if n < attempt)[-LOOK_BACK:]:
        yield number, rows_of(run_dir, paths[number])


def equality(config: Config, record: RunRecord) -> str | None:
    """A name for what the attempt's bits follow from, from the run's beginning on. None: reduce=fast promises none."""
    if config.reduce != "exact":
        return None
    values, affecting = settings(record.provenance["config"])
    path = list[list[Any]]()
    for entry in record.provenance["history"]:
        world = entry.get("world_size") if config.batch.per_process_size is not None else None
        numerics = [entry.get("numerics"), world]
        if not path or entry.get("changes") or numerics != path[-1][2:]:
            path.append([entry.get("from_step"), entry.get("changes"), *numerics])
    dropped = sorted(r.dropped for n, r in records(config.run.dir).items() if n < record.attempt and r.dropped)
    all_of_it = [{key: values[key] for key in sorted(affecting)}, path, dropped]
    return sha256(json.dumps(all_of_it, sort_keys=True, default=str).encode()).hexdigest()[:16]


class SameBits:
    """Publishes BitsDiffer at the first step of this attempt that has other bits than in an attempt before.

    note: adds a row to this attempt's metrics. What the attempts before have recorded is read in a thread.
    """

    def __init__(
        self,
        config: Config,
        record: RunRecord,
        note: Callable[[Mapping[str, Any]], None],
        publish: Callable[[BitsDiffer], None],
        say: Callable[[str], None],
        wants: Callable[[int], bool],
    ) -> None:
        self.config, self.record, self.note, self.publish = config, record, note, publish
        self.say, self.wants = say, wants
        self._before: dict[int, tuple[int, Figures]] = {}
        self._new: list[StepDone | StepComputed] = []
        self._thread = threading.Thread(target=self._read, name="earlier attempts", daemon=True)
        self._thread.start()

    def on(self, event: Event) -> None:
        match event:
            case StepDone() | StepComputed():
                self._new.append(event)
            case AttemptEnded() | AttemptFailed():
                self._thread.join(LIMIT_SECONDS)
        if not self._thread.is_alive():
            new, self._new = self._new, []
            for step in new:
                self._compare(step)

    def _compare(self, new: StepDone | StepComputed) -> None:
        before, (loss, norm) = self._before.get(new.step, (0, (None, None)))
        if before and _figures(new.loss, new.grad_norm) != (loss, norm):
            self._before = {}  # all later steps differ, too
            pairs = ((_number(loss), new.loss), (_number(norm), new.grad_norm))
            self.publish(BitsDiffer(new.step, self.record.attempt, before, *pairs))

    def _read(self) -> None:
        try:
            name = equality(self.config, self.record)
            if name is None:
                return
            self.note({FIELD: name})
            for number, rows in recorded(self.config.run.dir, self.record.attempt):
                if any(row.get(FIELD) == name for row in rows):
                    self._before |= {
                        row["step"]: (number, (row["loss"], row["grad_norm"])) for row in rows if "grad_norm" in row
                    }
        except Exception as error:
            self.say(f"not compared with the attempts before: {without_secrets(str(error)) or type(error).__name__}")


def _figures(*values: float) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in values)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
