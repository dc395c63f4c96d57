"""Run directories as a run leaves them, without a run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.observe.trace import RECORD
from mingpt.snapshot.store import Store
from tests.kits.snapshot_kit import PROVENANCE, save

START = 1_700_000_000.0
CONFIG: dict[str, Any] = {
    "run": {"name": "made"}, "batch": {"global_size": 8, "per_process_size": None}, "model": {"block_size": 16},
    "optimizer": {"lr": 0.01},
}  # fmt: skip


def loss_of(step: int) -> float:
    """The loss that a step has, unless a test says otherwise."""
    return 1 + 1 / step


class Made:
    """A run directory. Each attempt computes a step in 10 s, after 100 s in which it starts."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.history: list[dict[str, Any]] = []

    def attempt(
        self, number: int, start: int, last: int, parent: int = 0, losses: Mapping[int, float] | None = None,
        booked: int | None = None, **account: Any,
    ) -> "Made":  # fmt: skip
        """booked: the last step of the account, which is written now and then only. account: other fields of it."""
        world = account.get("world_size", 2)
        steps = range(start + 1, last + 1)
        rows = [self.row(step, world, (losses or {}).get(step, loss_of(step))) for step in steps]
        self.claim(number, start, parent).metrics(number, rows)
        trace = np.zeros(len(steps), RECORD)
        trace["step"], trace["norm"], trace["loss"] = steps, 0.5, [row["loss"] for row in rows]
        trace.tofile(self._path(f"trace/attempt-{number:05d}-{start + 1:09d}.bin"))
        began = START + 10_000 * (number - 1)
        done = (last if booked is None else booked) - start
        spent = {"import": 60.0, "load": 40.0, "step": 9.0 * done, "wait": 1.0 * done}
        account = {
            "attempt": number, "from_step": start, "step": start + done, "world_size": world, "device": "cpu",
            "host": "n1", "started": began, "until": began + sum(spent.values()), "seconds": spent, "end": None,
            "price": None, **account,
        }  # fmt: skip
        self._path(f"ledger/attempt-{number:05d}.json").write_text(json.dumps(account))
        numerics = {"torch": "2", "device": account["device"], "reduce": "exact"}
        self.history.append({"attempt": number, "from_step": start, "world_size": world, "numerics": numerics})
        return self

    def _path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @staticmethod
    def row(step: int, world: int = 2, loss: object = None) -> dict[str, Any]:
        return {"step": step, "loss": loss, "lr": 0.01, "grad_norm": 0.5, "tokens_per_second": 12.8,
                "step_seconds": 10.0, "world_size": world}  # fmt: skip

    def claim(self, number: int, start: int, parent: int = 0, by: str = "train") -> "Made":
        claim = {"id": f"{number}", "by": by, "from_step": start, "from_digest": None, "parent": parent}
        self._path(f"attempts/{number:05d}.json").write_text(json.dumps(claim))
        return self

    def metrics(self, number: int, rows: list[dict[str, Any]]) -> "Made":
        with self._path(f"metrics/attempt-{number:05d}.jsonl").open("a") as file:
            file.writelines(json.dumps({"attempt": number, **row}) + "\n" for row in rows)
        return self

    def snapshot(self, step: int, **provenance: Any) -> str:
        """The digest of a snapshot of this step, by the newest attempt."""
        made = {"run": "made", "config": CONFIG, "history": self.history, "fingerprint": {"reduce": "exact"}}
        return save(Store(f"{self.folder}/snapshots"), step, provenance=PROVENANCE | made | provenance)


def three_attempts(folder: Path | str) -> Made:
    """Killed after step 12, stopped after step 20, finished at step 30."""
    made = Made(folder).attempt(1, 0, 12, world_size=1, booked=11)
    gpus: dict[str, Any] = {"world_size": 4, "device": "NVIDIA L4", "price": 2.0}
    made.attempt(2, 10, 20, parent=1, end="stopped", **gpus)
    made.metrics(2, [{"step": 16, "val_loss": 1.75}, {"step": 20, "val_loss": 1.5}])
    return made.attempt(3, 20, 30, parent=2, end="finished", host="n3")
