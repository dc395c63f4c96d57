"""An attempt's first half, in named steps: model, context, restore, claim. The second one is in running.py.

Until the claim nothing of the run is written, so a start that is refused leaves the run as it was. Each step is a
function or a constructor that a test can call with a world of one.
"""

from collections.abc import Callable

from torch import nn

from mingpt.cli.console import say
from mingpt.compute.numerics import pin
from mingpt.config.configfile import write_config
from mingpt.config.schema import Config
from mingpt.data.source import Source
from mingpt.errors import FINISHED
from mingpt.snapshot.attempts import make_run_dir
from mingpt.tiers.home import Home
from mingpt.tiers.tiers import Tiers
from mingpt.train import setup
from mingpt.train.claiming import Claimed, another_running, claim_attempt
from mingpt.train.origin import FirstWeights, restore
from mingpt.train.running import run
from mingpt.world.lifetime import Lifetime
from mingpt.world.world import World


def train(
    config: Config,
    source: Source,
    model: nn.Module,
    first_weights: FirstWeights,
    world: World,
    lifetime: Lifetime,
    notice_seconds: Callable[[], float] = lambda: 0.0,
    home: Home | None = None,
) -> int:
    """Train to train.max_steps, or until a process is asked to stop; returns the exit code.

    model: from factory.build, which need not be drawn; first_weights does that where there is no snapshot (see
    factory.py). notice_seconds: see Checkpointer. home: see Tiers.
    """
    clock = lifetime.clock
    setup.check_targets(config, source)
    clock.enter("compiler")
    pin(config, world.device)  # imports torch's compiler, which takes seconds, if the config compiles
    clock.enter("model")
    setup.place_model(config, source, model, world)
    # Only now: a start that is refused for its data or model leaves no folder behind.
    world.run_on_main(lambda: make_run_dir(config.run.dir))
    # Before Tiers, which sets snapshots aside: they may be those of an attempt that is still training.
    world.run_on_main(lambda: another_running(config))
    # Weights, two moments, and the weights' mean.
    state_bytes = (3 + bool(config.optimizer.ema)) * sum(p.nbytes for p in model.parameters())
    tiers = Tiers(config, world, state_bytes, say, home)
    context = setup.context_of(config, source, model, world)
    clock.enter("restore")
    origin = restore(config, source, context, tiers, clock, first_weights)
    complete = origin.loaded if origin.step >= config.train.max_steps else None
    if complete and tiers.is_durable(complete):
        # Not by `close`, as an attempt does that has stored the last step: this one was killed before it came there.
        tiers.forget_hot()
        if world.is_main:
            say(f"nothing to do: the run has reached step {origin.step}, and train.max_steps={config.train.max_steps}")
        return FINISHED
    record = claim_attempt(config, source, origin, tiers, world)
    # After the claim, which refuses a run.dir that is not shared: the file should not lie in one node's own folder.
    if world.is_main:
        write_config(config, say)
    return run(Claimed(config, source, context, tiers, origin, record, lifetime), notice_seconds)
