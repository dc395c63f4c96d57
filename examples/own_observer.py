"""An observer of your own: `observers=[{_target_: examples.own_observer.Table}]` writes a table for a spreadsheet.

An observer gets each event of mingpt.observe.events, in rank 0, in a thread of its own. It changes nothing of the run.
"""

import csv
import os

from mingpt.observe.events import AttemptEnded, AttemptFailed, Evaluated, Event, StepDone


class Table:
    """One row for each step that is logged: its figures, and the newest validation loss."""

    def __init__(self, run_dir: str, attempt: int, columns: tuple[str, ...] = ("loss", "lr", "grad_norm")) -> None:
        """run_dir and attempt are supplied by the run; columns may be given, as names of StepDone's fields."""
        os.makedirs(run_dir, exist_ok=True)
        self.file = open(os.path.join(run_dir, f"table-{attempt}.csv"), "w", newline="")  # noqa: SIM115
        self.rows, self.columns, self.val_loss = csv.writer(self.file), columns, float("nan")
        self.rows.writerow(["step", *columns, "val_loss"])

    def on(self, event: Event) -> None:
        match event:
            case StepDone(logged=True):
                self.rows.writerow([event.step, *(getattr(event, name) for name in self.columns), self.val_loss])
            case Evaluated():
                self.val_loss = event.val_loss
            case AttemptEnded() | AttemptFailed():
                self.file.close()
