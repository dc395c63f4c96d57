"""What earlier versions had, and what to use now: one line each, for one version."""

# `mingpt verb`, `verb --option`, keys, and `key=value` for a value of a key that stays.
KEYS = {
    "mingpt serve": "mingpt export RUN FOLDER, then transformers serve or vLLM (docs/serving.md)",
    "mingpt receipt": "mingpt snapshots digest RUN, and mingpt replay RUN@STEP --out FOLDER",
    "mingpt materialize": "mingpt replay RUN@STEP --out FOLDER",
    "mingpt sky-check": "sky launch --dryrun for the YAML, mingpt plan OVERRIDES for config, memory and cost",
    "mingpt sweep": "mingpt train -m KEY=A,B, Hydra's multirun (docs/sweeps.md)",
    "report --png": "the page has its pictures in it",
    "report --sample": "mingpt generate RUN",
    "replay --html": "mingpt replay RUN@STEP --json",
    "preflight --selftest": "mingpt selftest on each node",
    "selftest --quick": "leave it out, there is nothing else",
    **dict.fromkeys(("data.patch", "data.codes"), "examples/images reads pixels, and needs no codebook"),
    **dict.fromkeys(("data.draw", "data.image_weight"), "examples/images classifies, and nothing draws images"),
    "experiment=mnist_draw": "nothing draws images; experiment=mnist classifies them",
    "data=images": "data=mnist, fashion-mnist or cifar10, which examples/images reads (docs/workloads-images.md)",
    "data.kind=images": "a run of images starts anew, as experiment=mnist or cifar10 (docs/workloads-images.md)",
    "generate --out": "nothing draws images",
    "generate --each": "nothing draws images",
    "selftest --out": "mingpt selftest --json, whose `row` it is",
}

# Of the recipes' environment.
VARIABLES = {
    "BUCKET": "use RUN_DIR, below which a managed job has a folder named by its task",
    "BUCKET_NAME": "use RUN_DIR=s3://bucket/run1, and make the bucket first: aws s3 mb s3://bucket",
    "RUN": "use OVERRIDES='run.dir=s3://bucket/runs/that-run'",
    "MASTER_PORT": "use PET_MASTER_PORT, which torchrun reads",
    "RDZV_PORT": "the recipe's --rdzv_endpoint has the port: change it there",
    "MAX_RESTARTS": "use PET_MAX_RESTARTS, which torchrun reads",
}


def instead(name: str, shown: str = "") -> str | None:
    """What to say of a name that is gone; None: it is not among these. shown: the name as a person wrote it."""
    return f"{shown or name} is gone: {KEYS[name]}" if name in KEYS else None
