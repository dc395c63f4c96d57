"""`python -m mingpt.generate URL`: continue a text (--prompt …) or draw images (--out FILE) with a snapshot's model."""

import sys
from pathlib import Path
from typing import Any

import torch

from mingpt.cli import Parser
from mingpt.data.imagetokens import ImageTokens
from mingpt.data.vocabulary import TextVocabulary, Vocabulary, vocabulary_of
from mingpt.errors import CRASHED, MISTAKE, Mistake, Unavailable
from mingpt.model import GPT
from mingpt.models import gpt_of
from mingpt.pictures import draw, grid, png
from mingpt.snapshot.format import Damaged
from mingpt.snapshot.reader import read
from mingpt.snapshots import find
from mingpt.storage import place


def load_model(url: str, step: int | None = None) -> tuple[GPT, Vocabulary, dict[str, Any]]:
    """The newest snapshot's model (or that of `step`), on the CPU; its vocabulary; the config it was trained with.

    The model is built from the manifest's config alone. Raises Mistake if the snapshot is damaged or not one of ours.
    """
    found = find(url, step)
    try:
        loaded = read(found.store, found.steps[0], kinds=("model",))
    except Damaged as damage:
        raise Mistake(f"{found.store.folder_url(found.steps[0])}: {damage}: choose another with --step") from damage
    where = found.store.folder_url(found.steps[0])
    vocabulary = vocabulary_of(loaded.manifest.vocabulary)
    gpt = gpt_of(loaded.manifest.config, loaded.state["model"], vocabulary.size, where)
    return gpt, vocabulary, loaded.manifest.config


def main(arguments: list[str]) -> int:
    parser = Parser(prog="python -m mingpt.generate", description=__doc__)
    parser.add_argument("url", metavar="URL", help="a run's directory, its snapshots folder, or one step's folder")
    parser.add_argument("--prompt", default="\n", help="the text to continue (default: a new line)")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, help="choose among the k likeliest tokens (default: among all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a PNG file, where the model draws images")
    parser.add_argument("--each", type=int, default=10, help="how many images of each class to draw (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same text (default: 1)")
    parser.add_argument("--step", type=int, help="the snapshot of this step (default: the newest)")
    options = parser.parse_args(arguments)
    try:
        problems = [
            *(["--prompt is empty: give it at least one character"] if not options.prompt else []),
            *([f"--each {options.each}: at least 1"] if options.each < 1 else []),
            *([f"--tokens {options.tokens}: at least 1"] if options.tokens < 1 else []),
            *([f"--temperature {options.temperature}: 0 or more"] if not options.temperature >= 0 else []),
            *([f"--top-k {options.top_k}: at least 1"] if options.top_k is not None and options.top_k < 1 else []),
        ]
        if problems:
            raise Mistake(*problems)
        model, vocabulary, config = load_model(options.url, options.step)
        if isinstance(vocabulary, ImageTokens):
            if options.out is None:
                raise Mistake(f"{options.url}: a model of images: say where to draw them to with --out FILE.png")
            if not config["data"].get("draw"):
                raise Mistake(f"{options.url}: a model that was not trained to draw (data.draw=false): train another")
            sampling = {"temperature": options.temperature, "top_k": options.top_k, "seed": options.seed}
            images = draw(model, vocabulary, options.each, **sampling)
            with place("--out", str(options.out)):
                options.out.write_bytes(png(grid(images)))
            print(f"{options.out}: a row for each of {vocabulary.classes} classes, {options.each} images of each")
            return 0
        if options.out is not None or not isinstance(vocabulary, TextVocabulary):
            raise Mistake(f"{options.url}: a model that draws no images: leave --out out")
        prompt = torch.tensor([vocabulary.encode(options.prompt)])
        tokens = model.generate(
            prompt, options.tokens, temperature=options.temperature, top_k=options.top_k, seed=options.seed
        )
        print(vocabulary.decode(tokens[0].tolist()))
        return 0
    except Mistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return MISTAKE
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return CRASHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
