"""What earlier versions had, and what to use now: one line each, for one version."""

VERBS = {
    "serve": "mingpt export RUN FOLDER, then transformers serve or vLLM (docs/serving.md)",
    "receipt": "mingpt snapshots digest RUN and mingpt audit RUN",
    "materialize": "mingpt replay RUN@STEP --out FOLDER",
    "sky-check": "sky launch --dryrun for the YAML, mingpt plan OVERRIDES for config, memory and cost",
}
"""Verbs of `mingpt`."""

KEYS: dict[str, str] = {
    "report --png": "the page has its pictures in it",
    "report --sample": "mingpt generate RUN",
    "replay --html": "mingpt replay RUN@STEP --json",
    "selftest --quick": "leave it out, there is nothing else",
    "selftest --out": "mingpt selftest --json, whose `row` it is",
}
"""Keys, `key=value` for a value of a key that stays, and `verb --option`."""
