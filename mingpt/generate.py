"""`python -m mingpt.generate URL --prompt …`: continue a text with the model of a snapshot."""

import sys

import torch

from mingpt.cli import Parser
from mingpt.config import Model
from mingpt.data.vocabulary import TextVocabulary, vocabulary_of
from mingpt.errors import CRASHED, MISTAKE, Mistake, Unavailable
from mingpt.model import GPT, GPTConfig
from mingpt.snapshot.format import Damaged
from mingpt.snapshot.reader import read
from mingpt.snapshots import find


def load_model(url: str, step: int | None = None) -> tuple[GPT, TextVocabulary]:
    """The newest snapshot's model (or that of `step`) and its vocabulary, on the CPU.

    The model is built from the manifest's config alone. Raises Mistake if the snapshot is damaged or not one of ours.
    """
    found = find(url, step)
    try:
        loaded = read(found.store, found.steps[0], kinds=("model",))
    except Damaged as damage:
        raise Mistake(f"{found.store.folder_url(found.steps[0])}: {damage}: choose another with --step") from damage
    try:
        vocabulary = vocabulary_of(loaded.manifest.vocabulary)
        if not isinstance(vocabulary, TextVocabulary):
            raise ValueError("its tokens are no text")
        shape = Model.model_validate(loaded.manifest.config.get("model")).model_dump()
        gpt = GPT(GPTConfig(vocab_size=vocabulary.size, **shape))
        gpt.load_state_dict(loaded.state["model"])
    except (ValueError, KeyError, RuntimeError) as error:
        what = str(error).splitlines()[0]
        raise Mistake(
            f"{found.store.folder_url(found.steps[0])}: not a snapshot of a GPT of this version: {what}"
        ) from error
    return gpt.eval(), vocabulary


def main(arguments: list[str]) -> int:
    parser = Parser(prog="python -m mingpt.generate", description=__doc__)
    parser.add_argument("url", metavar="URL", help="a run's directory, its snapshots folder, or one step's folder")
    parser.add_argument("--prompt", default="\n", help="the text to continue (default: a new line)")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, help="choose among the k likeliest tokens (default: among all)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same text (default: 1)")
    parser.add_argument("--step", type=int, help="the snapshot of this step (default: the newest)")
    options = parser.parse_args(arguments)
    try:
        problems = [
            *(["--prompt is empty: give it at least one character"] if not options.prompt else []),
            *([f"--tokens {options.tokens}: at least 1"] if options.tokens < 1 else []),
            *([f"--temperature {options.temperature}: 0 or more"] if not options.temperature >= 0 else []),
            *([f"--top-k {options.top_k}: at least 1"] if options.top_k is not None and options.top_k < 1 else []),
        ]
        if problems:
            raise Mistake(*problems)
        model, vocabulary = load_model(options.url, options.step)
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
