"""Go back: the run continues from an older step, and nothing computed after that step comes back by itself."""

from collections.abc import Callable

from mingpt.errors import Damaged, UserError
from mingpt.snapshot import hot
from mingpt.snapshot.attempts import REWIND, Attempt
from mingpt.snapshot.files import REWOUND
from mingpt.snapshot.reader import manifest_or_none, read_manifest
from mingpt.snapshot.store import Store
from mingpt.storage import place


def rewind(
    run_dir: str,
    store: Store,
    step: int,
    hot_dir: str,
    log: Callable[[str], None],
    dropped: tuple[int, int] | None = None,
) -> None:
    """Make the next attempt start from `step`: set all newer snapshots aside, in the store and in this node's memory.

    The rewind is an attempt of its own. So an attempt that is still training commits nothing more, and the next start
    removes older hot snapshots from the memory of all nodes. dropped: batches (first, end) that no step shows any more.
    Raises UserError, before it changes anything, if `step` can't be read.
    """
    steps = store.steps()
    if step not in steps:
        shown = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"{store.url}: there is no snapshot of step {step}: choose one of those that there are ({shown})"
        )
    try:
        manifest = read_manifest(store, step)
    except Damaged as damage:
        raise UserError(f"{store.folder_url(step)}: {damage}: choose another step") from damage
    # The claims in run.dir are not enough: with snapshot.dir set, run.dir may be a new one.
    newest = max([manifest.attempt, *(found.attempt for s in steps if (found := manifest_or_none(store, s)))])
    Attempt.claim(run_dir, step, manifest.digest, manifest.attempt, by=REWIND, above=newest, dropped=dropped)
    memory = hot.find_hot(hot_dir, run_dir)
    for tier in (store, *([memory] if memory else [])):
        with place(tier.key, tier.url):
            for newer in [s for s in tier.steps() if s > step]:
                name = tier.set_aside(newer, REWOUND)
                log(f"step {newer}: set aside (its manifest is now {tier.folder_url(newer)}/{name})")
    log(f"the next attempt starts from step {step}, digest {manifest.digest}")
