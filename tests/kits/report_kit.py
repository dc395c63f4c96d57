"""Run directories as a run leaves them, without a run."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.observe.ledger import Account
from mingpt.observe.trace import RECORD
from mingpt.snapshot.store import Store
from snapshot_kit import PROVENANCE, save

START = 1_800_000_000.0
CONFIG: dict[str, Any] = {
    "run": {"name": "made"}, "batch": {"global_size": 8, "per_process_size": None}, "model": {"block_size": 16},
    "optimizer": {"lr": 0.01},
}  # fmt: skip


def loss_of(step: int) -> float:
    return 1 + 1 / step


@dataclass
class Made:
    """A run directory. Each attempt computes a step in 10 s, after 100 s in which it starts."""

    folder: Path
    history: list[dict[str, Any]] = field(default_factory=list)

    def attempt(
        self,
        number: int,
        start: int,
        last: int,
        parent: int = 0,
        world: int = 2,
        end: str | None = None,
        device: str = "cpu",
        host: str = "n1",
        price: float | None = None,
        losses: dict[int, float] | None = None,
        booked: int | None = None,
        snapshots: tuple[int, ...] = (),
    ) -> "Made":
        """booked: the last step of the account, which is written now and then only."""
        losses = losses or {}
        self.claim(number, start, parent)
        steps = np.arange(start + 1, last + 1)
        began = START + 10_000 * (number - 1)
        trace = np.zeros(len(steps), RECORD)
        trace["step"], trace["norm"] = steps, 0.5
        trace["loss"] = [losses.get(int(s), loss_of(int(s))) for s in steps]
        (self.folder / "trace").mkdir(exist_ok=True)
        trace.tofile(self.folder / f"trace/attempt-{number:05d}-{start + 1:09d}.bin")
        done = last if booked is None else booked
        spent = {"import": 60.0, "load": 40.0, "step": 9.0 * (done - start), "wait": 1.0 * (done - start)}
        account = Account(
            number, start, done, world, device, host, began, began + sum(spent.values()), spent, end,
            [(s, began + 100 + 10.0 * (s - start), 0.5) for s in snapshots], price,
        )  # fmt: skip
        (self.folder / "ledger").mkdir(exist_ok=True)
        (self.folder / f"ledger/attempt-{number:05d}.json").write_text(json.dumps(asdict(account)))
        self.metrics(number, [self.row(s, world, losses.get(s, loss_of(s))) for s in range(start + 1, last + 1)])
        numerics = {"torch": "2", "device": device, "reduce": "exact"}
        self.history.append({"attempt": number, "from_step": start, "world_size": world, "numerics": numerics})
        return self

    @staticmethod
    def row(step: int, world: int = 2, loss: object = None) -> dict[str, Any]:
        return {"step": step, "loss": loss, "lr": 0.01, "grad_norm": 0.5, "tokens_per_second": 12.8,
                "step_seconds": 10.0, "world_size": world}  # fmt: skip

    def claim(self, number: int, start: int, parent: int = 0, by: str = "train") -> "Made":
        (self.folder / "attempts").mkdir(parents=True, exist_ok=True)
        claim = {"id": f"{number}", "by": by, "from_step": start, "from_digest": None, "parent": parent}
        (self.folder / f"attempts/{number:05d}.json").write_text(json.dumps(claim))
        return self

    def metrics(self, number: int, rows: list[dict[str, Any]]) -> "Made":
        (self.folder / "metrics").mkdir(parents=True, exist_ok=True)
        with (self.folder / f"metrics/attempt-{number:05d}.jsonl").open("a") as file:
            file.writelines(json.dumps({"attempt": number, **row}) + "\n" for row in rows)
        return self

    def snapshot(self, step: int, **provenance: Any) -> str:
        """The digest of a snapshot of this step, by the newest attempt."""
        made = {"run": "made", "config": CONFIG, "history": self.history, "fingerprint": {"reduce": "exact"}}
        return save(Store(f"{self.folder}/snapshots"), step, provenance=PROVENANCE | made | provenance)


def three_attempts(folder: Path) -> Made:
    """Killed after step 12, stopped after step 20, finished at step 30."""
    made = Made(folder).attempt(1, 0, 12, world=1, snapshots=(5, 10), booked=11)
    made.attempt(2, 10, 20, parent=1, world=4, end="stopped", device="NVIDIA L4", price=2.0, snapshots=(20,))
    made.metrics(2, [{"step": 16, "val_loss": 1.75}, {"step": 20, "val_loss": 1.5}])
    return made.attempt(3, 20, 30, parent=2, end="finished", host="n3")
