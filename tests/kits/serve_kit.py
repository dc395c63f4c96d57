"""Small models that `mingpt serve` loads, and a real server in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette

from mingpt.commands.loading import open_model
from mingpt.data.vocabulary import TextVocabulary
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.kinds.gpt import GPTModel
from mingpt.serve.__main__ import parser
from mingpt.serve.app import Served, app_of
from mingpt.serve.command import listen, served_of
from mingpt.snapshot.store import Store
from node_kit import wait_until
from snapshot_kit import PROVENANCE, save, state_of

CHARACTERS = "\n :ABSUabcdeéinrstu"
NAME = "little"


def trained(folder: Path, vocabulary: dict[str, Any] | None = None, size: int = len(CHARACTERS), **config: Any) -> Path:
    """A run with a snapshot as the trainer writes it, of a model whose text depends on what it has read."""
    torch.manual_seed(1)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8}
    model = GPT(GPTConfig(vocab_size=size, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)
    about = {"model": GPTModel.model_validate(shape).model_dump(), "run": {"name": NAME}, **config}
    state = {"model": model.state_dict(), "optimizer": state_of(1)["optimizer"]}
    vocabulary = vocabulary or {"kind": "char", "characters": CHARACTERS}
    store = Store(f"{folder}/snapshots")
    save(store, 1, state, provenance=PROVENANCE | {"vocabulary": vocabulary, "config": about})  # type: ignore[arg-type]
    return folder


def served_for(run: Path, *options: str, **changed: Any) -> Served:
    opened = open_model(str(run))
    assert isinstance(opened.vocabulary, TextVocabulary)
    return replace(served_of(opened, parser().parse_args([str(run), *options])), **changed)


@contextmanager
def serving(served: Served, app: Starlette | None = None) -> Iterator[str]:
    """Its address. app: another one than its own."""
    server = uvicorn.Server(uvicorn.Config(app or app_of(served), lifespan="off", log_config=None, access_log=False))
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            wait_until(lambda: server.started, "the server listens")
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
            served.worker.close()
    assert not thread.is_alive()
