"""`python -m mingpt.generate URL`: continue texts (--prompt …) or draw images (--out FILE) with a snapshot's model."""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch

from mingpt.command import command
from mingpt.commands.loading import Opened, open_model
from mingpt.config.commandline import Parser
from mingpt.data.images.imagetokens import ImageTokens
from mingpt.data.images.pictures import COLORS, draw, grid, png
from mingpt.data.vocabulary import Numbers, TextVocabulary, Vocabulary
from mingpt.errors import UserError
from mingpt.model.gpt2 import GPT
from mingpt.model.sampling import generate_stream
from mingpt.redact import escaped, without_secrets
from mingpt.storage import open_fs, place

BETWEEN = "---------------\n"  # texts
UNFINISHED = "\ufffd"  # what stands for bytes that are not, or not yet, UTF-8


@dataclass
class Text:
    """One text as it grows: its tokens, and how much of it has been told."""

    prompt: list[int]
    number: int
    tokens: list[int] = field(default_factory=list)  # with the prompt's
    _known: int = 0  # tokens from here on tell how the next ones are to be read
    _told: int = 0  # tokens whose text has been told

    def news(self, vocabulary: TextVocabulary, end: bool) -> str:
        """What can be told now and was not before. What may be half a character waits for the rest, or for the end."""
        before = vocabulary.decode(self.tokens[self._known : self._told])
        now = vocabulary.decode(self.tokens[self._known :])
        if now.endswith(UNFINISHED) and not end:
            return ""
        self._known, self._told = self._told, len(self.tokens)
        return now[len(before) :]


def grow(model: GPT, texts: Sequence[Text], options: argparse.Namespace) -> Iterator[None]:
    """Draw the next token of each of these texts, again and again until each has --tokens more than its prompt."""
    block = model.config.block_size
    prompts = [text.prompt[-block:] for text in texts]  # more is never seen
    lengths = [len(prompt) for prompt in prompts]
    rows = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts])
    stream = generate_stream(
        model,
        rows,
        options.tokens,
        lengths=lengths,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        numbers=[text.number for text in texts],
    )
    for position, column in enumerate(stream, min(lengths)):
        for text, length, token in zip(texts, lengths, column.tolist(), strict=True):
            if length <= position < length + options.tokens:
                text.tokens.append(token)
        yield


def write(
    model: GPT, vocabulary: TextVocabulary, texts: Sequence[Text], options: argparse.Namespace, out: TextIO
) -> None:
    """Each text to `out` as it grows, in their order: what is drawn along with the one that is being told waits."""
    at = 0
    for begin in range(0, len(texts), options.batch):
        batch = texts[begin : begin + options.batch]
        for _ in grow(model, batch, options):
            while at < begin + len(batch):
                text = texts[at]
                end = len(text.tokens) == len(text.prompt) + options.tokens
                # A vocabulary, which may be a stranger's, spells no escape codes; a \r is a part of many texts.
                out.write("\r".join(map(escaped, text.news(vocabulary, end).split("\r"))))
                if not end:
                    break
                at += 1
                out.write("\n" + (BETWEEN if at < len(texts) else ""))
            out.flush()


def picture(opened: Opened, options: argparse.Namespace) -> str:
    """Draw images of each class to --out; returns what there is to say of it."""
    tokens = opened.vocabulary
    if not isinstance(tokens, ImageTokens):
        raise UserError(f"{opened.where}: a model that draws no images: leave --out out")
    data = opened.manifest.config.get("data")
    if not isinstance(data, dict) or not data.get("draw"):
        raise UserError(f"{opened.where}: a model that was not trained to draw (data.draw=false): train another")
    if tokens.per_image > opened.model.config.block_size or tokens.shape[2] not in COLORS:
        raise UserError(f"{opened.where}: a model whose images, {tokens.shape}, can't be drawn: choose another")
    images = draw(
        opened.model,
        tokens,
        options.each,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    with place("--out", str(options.out)):
        options.out.write_bytes(png(grid(images)))
    return f"{options.out}: a row for each of {tokens.classes} classes, {options.each} images of each"


def prompts_of(options: argparse.Namespace, vocabulary: TextVocabulary) -> list[str]:
    """What is to be continued. Bytes that are not UTF-8 stay what they are, for models of bytes."""
    if options.file is None:
        return [options.prompt or ("0" if isinstance(vocabulary, Numbers) else "\n")]
    if options.file == "-":
        raw = sys.stdin.buffer.read()
    else:
        fs, path = open_fs(options.file, "--file")
        with place("--file", options.file):
            raw = fs.cat_file(path)
    text = raw.decode(errors="surrogateescape")
    return [line for line in text.splitlines() if line] if options.lines else [text]


def problems(options: argparse.Namespace) -> list[str]:
    return [
        *(["--prompt is empty: give it at least one character"] if options.prompt == "" else []),
        *([f"--each {options.each}: at least 1"] if options.each < 1 else []),
        *(["--lines splits a file: give --file, too"] if options.lines and options.file is None else []),
        *([f"--tokens {options.tokens}: at least 1"] if options.tokens < 1 else []),
        *([f"--samples {options.samples}: at least 1"] if options.samples < 1 else []),
        *([f"--batch {options.batch}: at least 1"] if options.batch < 1 else []),
        *(
            [f"--temperature {options.temperature}: a number, 0 or more"]
            if not 0 <= options.temperature < math.inf
            else []
        ),
        *([f"--top-k {options.top_k}: at least 1"] if options.top_k is not None and options.top_k < 1 else []),
        *(
            [f"--top-p {options.top_p}: above 0 and at most 1"]
            if options.top_p is not None and not 0 < options.top_p <= 1
            else []
        ),
    ]


def _parser() -> Parser:
    parser = Parser(prog="python -m mingpt.generate", description=__doc__)
    parser.add_argument("url", metavar="URL", help="a run's directory, its snapshots folder, or one step's folder")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue (default: a new line; of plain numbers: 0)")
    source.add_argument("--file", metavar="FILE", help="continue what is in this file or URL; -: standard input")
    parser.add_argument("--lines", action="store_true", help="each line of the file is a prompt of its own")
    parser.add_argument("--samples", type=int, default=1, help="texts for each prompt (default: 1)")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, help="choose among the k likeliest tokens (default: among all)")
    parser.add_argument("--top-p", type=float, help="and among the likeliest that have this share of the chance")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a PNG file, where the model draws images")
    parser.add_argument("--each", type=int, default=10, help="how many images of each class to draw (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same texts (default: 1)")
    parser.add_argument("--batch", type=int, default=16, help="texts at a time; fewer need less memory (default: 16)")
    parser.add_argument("--speed", action="store_true", help="say on stderr how many tokens a second were drawn")
    parser.add_argument("--step", type=int, help="the snapshot of this step (default: the newest)")
    return parser


def generate(opened: Opened, options: argparse.Namespace) -> int:
    """What the options ask of a model. Returns the exit code."""
    try:
        if options.out is not None:
            print(picture(opened, options))
        else:
            continue_texts(opened.model, opened.vocabulary, opened.where, options)
    except FloatingPointError as error:
        raise UserError(f"{opened.where}: {error}: its run has diverged; choose another with --step") from error
    return 0


def continue_texts(model: GPT, vocabulary: Vocabulary, where: str, options: argparse.Namespace) -> None:
    if isinstance(vocabulary, ImageTokens):
        raise UserError(f"{where}: a model of images: say where to draw them to with --out FILE.png")
    if not isinstance(vocabulary, TextVocabulary):
        raise UserError(f"{where}: its tokens are no text, and nothing can be written with them")
    prompts = [vocabulary.encode(prompt) for prompt in prompts_of(options, vocabulary)]
    if not all(prompts) or not prompts:
        raise UserError(
            f"--file {without_secrets(options.file)}: nothing is in it to be continued: give at least one character"
        )
    texts = [Text(prompt, number, [*prompt]) for prompt in prompts for number in range(options.samples)]
    began = time.perf_counter()
    write(model, vocabulary, texts, options, sys.stdout)
    if options.speed:
        count, seconds = len(texts) * options.tokens, time.perf_counter() - began
        print(f"{count:,} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens/s", file=sys.stderr)


@command()
def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if found := problems(options):
        raise UserError(*found)
    return generate(open_model(options.url, options.step), options)
