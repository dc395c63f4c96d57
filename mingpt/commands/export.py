"""`mingpt export URL FOLDER`: a snapshot's GPT as transformers and vLLM load it."""

from argparse import Namespace

from mingpt.command import Unfit
from mingpt.commands.loading import load
from mingpt.console import say
from mingpt.redact import without_secrets
from mingpt.snapshot.reader import damage_as, find
from mingpt.weights.writing import folder_of, write_folder


def export_command(options: Namespace) -> int:
    found = find(options.url, options.step)
    with damage_as(Unfit, found.store, found.steps[0], ": nothing was written; choose another with --step"):
        loaded = load(found.store, found.steps[0])
    data = loaded.manifest.config.get("data")
    chat = isinstance(data, dict) and data.get("kind") == "chat"
    files = folder_of(loaded.model, loaded.vocabulary, chat)
    write_folder(options.folder, files, options.overwrite)
    say(f"step {found.steps[0]} (digest {loaded.manifest.digest[:16]}): {', '.join(files)}")
    say(f"written to {without_secrets(options.folder)}")
    return 0
