"""`mingpt export URL FOLDER`: a snapshot's GPT as transformers and vLLM load it, in a folder and on the hub."""

from argparse import Namespace
from typing import Any

import yaml

from mingpt.cli.command import Unfit
from mingpt.cli.console import say
from mingpt.commands.loading import load
from mingpt.config.affecting import section_of
from mingpt.config.datasets import PLAIN
from mingpt.errors import UserError
from mingpt.files import hub
from mingpt.files.storage import open_fs, place
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.reader import BEST, damage_as, find
from mingpt.weights.writing import folder_of, write_folder

CARD, CONFIG = "README.md", "run.yaml"
OURS = {"run", "track", "world", "snapshot", "profile", "resume"}  # sections that nobody else needs


def export_command(options: Namespace) -> int:
    if not options.folder and not options.push:
        raise UserError("nowhere to write to: give a FOLDER, or --push OWNER/NAME")
    found = find(options.url, options.step)
    with damage_as(Unfit, found.store, found.steps[0], ": nothing was written; choose another with --step"):
        loaded = load(found.store, found.steps[0], options.ema)
    data = section_of(loaded.manifest.config, "data")
    chat = str(data.get("template", PLAIN)) if data.get("kind") == "chat" else ""
    files = folder_of(loaded.model, loaded.vocabulary, chat)
    lowest = loaded.manifest.metrics.best_val_loss
    if len(found.steps) > 1 and lowest is not None and lowest != loaded.manifest.metrics.val_loss:
        say(f"an earlier step had a lower validation loss, {lowest:.4f}: RUN@{BEST} exports the best that stayed")
    say(f"step {found.steps[0]} (digest {loaded.manifest.digest[:16]}): {', '.join(files)}")
    if options.folder:
        write_folder(options.folder, files, options.overwrite)
        say(f"written to {options.folder}")
    if options.push:
        say(f"pushed to {_push(options, loaded.manifest, files)}")
    return 0


def _push(options: Namespace, manifest: Manifest, files: dict[str, bytes]) -> str:
    """Commit the files, a card and the run's config as a whole; returns the commit's URL."""
    url = f"{hub.SCHEME}{(name := options.push.removeprefix(hub.SCHEME))}"
    if hub.model_at(url) != (name, None):
        raise UserError(f"--push={options.push}: give OWNER/NAME, as in me/my-model")
    open_fs(url, "--push")  # that the client is there
    from huggingface_hub import CommitOperationAdd, HfApi

    config = {key: value for key, value in manifest.config.items() if key not in OURS}
    config["health"] = {key: value for key, value in section_of(config, "health").items() if key != "notify"}
    about = {CARD: _card(name, manifest, config), CONFIG: yaml.safe_dump(config, sort_keys=False)}
    files = {key: text.encode() for key, text in about.items()} | files
    with place("--push", url):
        api = HfApi()
        api.create_repo(name, private=not options.public, exist_ok=True)
        there = sorted(files.keys() & {*api.list_repo_files(name)})
        if there and not options.overwrite:
            raise UserError(f"--push={url} has {', '.join(there)} already: choose another name, or add --overwrite")
        operations = [CommitOperationAdd(path, content) for path, content in files.items()]
        message = f"Step {manifest.step}, digest {manifest.digest[:16]}"
        return str(api.create_commit(name, operations, commit_message=message).commit_url)


def _card(name: str, manifest: Manifest, config: dict[str, Any]) -> str:
    used, losses, data = manifest.fingerprint, manifest.metrics, section_of(config, "data")
    start, own = section_of(config, "model").get("init_from"), CONFIG.partition(".")[0]
    base = hub.model_at(start) if isinstance(start, str) else None
    about = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["mingpt"]}
    about |= {"base_model": base[0]} if base else {}
    measured = {"training loss": losses.loss, "validation loss": losses.val_loss, "lowest so far": losses.best_val_loss}
    rows = {
        "steps": manifest.step,
        **{what: value for what, value in measured.items() if value is not None},
        "digest of weights and optimizer state": f"`{manifest.digest}`",
        "data": f"`{data.get('path') or data.get('kind')}`, sha256 `{used.get('data')}`",
        **({"started from": f"`{start}`, sha256 `{used.get('init_from')}`"} if start else {}),
        "computed with": ", ".join(f"{key} {used[key]}" for key in ("torch", "device", "cuda", "gpu") if used.get(key)),
    }
    table = "\n".join(f"| {what} | {value} |" for what, value in rows.items())
    return f"""---
# license: fill in, for instance mit: the hub shows it, and its search finds it
{yaml.safe_dump(about, sort_keys=False)}---

# {name}

Fill in: what the model is for, and what it cannot do.

| | |
|---|---|
{table}

## Make it again

```
hf download {name} {CONFIG} --local-dir again
mingpt train --config-dir again --config-name {own} run.dir=runs/again train.max_steps={manifest.step}
mingpt snapshots digest runs/again
```

The digest is the same with the same data on a machine of the same kind, with any number of processes.

## Licence

Fill in: of these weights, which may depend on that of the data{" and of the model it started from" if start else ""}.
"""
