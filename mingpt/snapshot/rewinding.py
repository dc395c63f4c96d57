"""Going back: a run continues from an older step, and nothing that was computed beyond it comes back by itself."""

from collections.abc import Callable

from mingpt.errors import Damaged, UserError
from mingpt.snapshot import hot
from mingpt.snapshot.attempts import REWIND, Attempt
from mingpt.snapshot.files import REWOUND
from mingpt.snapshot.lineage import peek
from mingpt.snapshot.reader import read_manifest
from mingpt.snapshot.store import Store
from mingpt.storage import place


def rewind(
    run_dir: str,
    store: Store,
    step: int,
    hot_dir: str,
    say: Callable[[str], None],
    dropped: tuple[int, int] | None = None,
) -> None:
    """Have the next attempt start from `step`: set all newer snapshots aside, here and in this node's memory.

    The rewind is an attempt of its own. So one that is still training may commit nothing more, and what other nodes
    have in memory is known to be from before. dropped: batches (first, end) that no step shows any more.
    Raises UserError, before anything is changed, unless the step is there.
    """
    there = store.steps()
    if step not in there:
        shown = ", ".join(map(str, there)) or "none"
        raise UserError(
            f"{store.url}: there is no snapshot of step {step}: choose one of those that there are ({shown})"
        )
    try:
        manifest = read_manifest(store, step)
    except Damaged as damage:
        raise UserError(f"{store.folder_url(step)}: {damage}: choose another step") from damage
    newest = max([manifest.attempt, *(found.attempt for s in there if (found := peek(store, s)))])
    Attempt.claim(run_dir, step, manifest.digest, manifest.attempt, by=REWIND, above=newest, dropped=dropped)
    memory = hot.find_hot(hot_dir, run_dir)
    for tier in (store, *([memory] if memory else [])):
        with place(tier.key, tier.url):
            for newer in [s for s in tier.steps() if s > step]:
                name = tier.set_aside(newer, REWOUND)
                say(f"step {newer}: set aside (its manifest is now {tier.folder_url(newer)}/{name})")
    say(f"the next attempt starts from step {step}, digest {manifest.digest}")
