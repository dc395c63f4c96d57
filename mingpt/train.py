"""`python -m mingpt.train [overrides]`: train a GPT, alone or as one of torchrun's processes.

Exit codes: 0 finished; 64 a mistake to fix; 75 stopped on request after a snapshot; 70 a crash, try again.
"""

import os
import sys
import time
import traceback

from mingpt import cli, trainer
from mingpt.config import Config, without_secrets
from mingpt.data.text import Text, open_text
from mingpt.distributed import World, join, speaks_for_node, world_size
from mingpt.errors import CRASHED, FINISHED, MISTAKE, Mistake
from mingpt.metrics import say
from mingpt.numerics import differences

SPEAK_SECONDS = 10  # after which a mistake that this process alone has found is printed, too


def main(arguments: list[str]) -> int:
    try:
        config = cli.configure(arguments, world_size())
        if config is None:  # --help or --cfg has been answered
            return FINISHED
        text = open_text(config.data, config.model.block_size)
        with join(config.world) as world:
            agree_on_inputs(world, config, text)
            if world.speaks:
                say(cli.as_yaml(config))
            return trainer.train(config, text, world)
    except Mistake as mistake:
        if mistake.everywhere and not speaks_for_node():
            # The process that speaks has found the same: it prints, exits, and torchrun ends this one. Exiting first
            # would have torchrun end that one before it has printed.
            time.sleep(SPEAK_SECONDS)
        print(f"error: {mistake}", file=sys.stderr, flush=True)
        return MISTAKE
    except Exception:
        traceback.print_exc()
        return CRASHED


def agree_on_inputs(world: World, config: Config, text: Text) -> None:
    """Raise Mistake in every process unless all have the same config and the same data."""
    first, *others = world.gather({"data.sha256": text.sha256} | config.model_dump())
    for rank, inputs in enumerate(others, 1):
        if changed := differences(first, inputs):
            # Where only a secret differs, the keys alone are told.
            shown = ", ".join(
                differences(without_secrets(first), without_secrets(inputs)) or (c.split(":")[0] for c in changed)
            )
            raise Mistake(f"process {rank} has other settings or data than process 0: {shown}")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The exit code is what launchers act on. After an error, its traceback still holds DDP and with it gloo's threads
    # (see distributed.join), so Python's own shutdown could replace the code by SIGABRT.
    os._exit(code)
