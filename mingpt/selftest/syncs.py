"""`mingpt train` on a GPU, in which an operation that waits for the device ends the run with torch's error.

Only steps are watched, those after the first ones: what is between them (a line that is printed, a snapshot's
end) may wait. Prints how much pinned memory the run has taken.
"""

from typing import TYPE_CHECKING

import torch

from mingpt.console import say
from mingpt.train import loop
from mingpt.train.__main__ import main as train
from mingpt.train.stats import StepStats

if TYPE_CHECKING:
    from mingpt.train.run import Run

FIRST = 5  # the steps before it allocate


def watch() -> None:
    """Have the loop's steps watched from now on."""
    step_of_the_loop = loop.train_step

    def train_step(run: "Run", step: int) -> StepStats:
        if step < FIRST:
            return step_of_the_loop(run, step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step_of_the_loop(run, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            if step + 1 == run.last_step:
                say(f"pinned: {torch.cuda.host_memory_stats().get('allocated_bytes.peak', 0):,} bytes")

    loop.train_step = train_step


def main() -> None:
    watch()
    train()


if __name__ == "__main__":
    main()
