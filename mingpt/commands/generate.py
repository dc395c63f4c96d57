"""What `mingpt generate` does: continue texts with a snapshot's model."""

import math
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mingpt.cli.console import complain, escaped, put
from mingpt.commands.loading import device_of, open_model
from mingpt.data.source import TextVocabulary, Vocabulary
from mingpt.data.vocabulary import Numbers
from mingpt.errors import UserError
from mingpt.files.storage import open_fs, place
from mingpt.model.language import LanguageModel
from mingpt.model.sampling import generate_stream

BETWEEN = "---------------\n"  # texts
UNFINISHED = "\ufffd"  # decoders put it in place of bytes that are not valid UTF-8, or not yet


@dataclass
class Text:
    """One text while it is generated."""

    prompt: list[int]
    number: int  # of the sample: it and --seed determine what is drawn
    tokens: list[int] = field(default_factory=list)  # the prompt's and the generated ones
    _context: int = 0  # decoding starts here: a token's text may depend on the one before it
    _printed: int = 0  # tokens whose text has been returned

    def new_text(self, vocabulary: TextVocabulary, end: bool) -> str:
        """The text since the last call. A character whose bytes are incomplete waits for the rest, or for the end."""
        before = vocabulary.decode(self.tokens[self._context : self._printed])
        now = vocabulary.decode(self.tokens[self._context :])
        if now.endswith(UNFINISHED) and not end:
            return ""
        self._context, self._printed = self._printed, len(self.tokens)
        return now[len(before) :]


def grow(model: LanguageModel, texts: Sequence[Text], options: Namespace) -> Iterator[None]:
    """Generate one token for each text per iteration, until each has `tokens` tokens after its prompt."""
    block = model.config.block_size
    prompts = [text.prompt[-block:] for text in texts]  # the model sees no more
    lengths = [len(prompt) for prompt in prompts]
    device = next(model.parameters()).device
    rows = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts], device=device)
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


def write(model: LanguageModel, vocabulary: TextVocabulary, texts: Sequence[Text], options: Namespace) -> None:
    """Generate the texts in batches and write them in order, each as it grows. The others of its batch wait."""
    at = 0
    for begin in range(0, len(texts), options.batch):
        batch = texts[begin : begin + options.batch]
        for _ in grow(model, batch, options):
            new = ""
            while at < begin + len(batch):
                text = texts[at]
                end = len(text.tokens) == len(text.prompt) + options.tokens
                # Escape terminal codes, which a vocabulary may contain, but not \r, which many texts contain.
                new += "\r".join(map(escaped, text.new_text(vocabulary, end).split("\r")))
                if not end:
                    break
                at += 1
                new += "\n" + (BETWEEN if at < len(texts) else "")
            if not put(new):
                return


def prompts_of(options: Namespace, vocabulary: TextVocabulary) -> list[str]:
    """The texts to continue. Bytes that are not UTF-8 survive as surrogates, for models of bytes."""
    if options.file is None:
        return [options.prompt or ("0" if isinstance(vocabulary, Numbers) else "\n")]
    if options.file == "-":
        raw = sys.stdin.buffer.read()
    else:
        fs, path = open_fs(options.file, "--file")
        with place("--file", options.file):
            raw = fs.cat_file(path)
    text = raw.decode("utf-8-sig", "surrogateescape")
    if not options.lines:
        return [text]
    # Not `splitlines`, which also cuts where a text has U+2028 or a form feed.
    return [line for line in (part.removesuffix("\r") for part in text.split("\n")) if line]


def problems(options: Namespace) -> list[str]:
    """What is wrong with the options, one message each."""
    found = {
        "--prompt is empty: give it at least one character": options.prompt == "",
        "--lines splits a file: give --file, too": options.lines and options.file is None,
        f"--tokens {options.tokens}: at least 1": options.tokens < 1,
        f"--samples {options.samples}: at least 1": options.samples < 1,
        f"--batch {options.batch}: at least 1": options.batch < 1,
        f"--temperature {options.temperature}: a number, 0 or more": not 0 <= options.temperature < math.inf,
        f"--top-k {options.top_k}: at least 1": options.top_k is not None and options.top_k < 1,
        f"--top-p {options.top_p}: above 0 and at most 1": options.top_p is not None and not 0 < options.top_p <= 1,
    }
    return [problem for problem, is_there in found.items() if is_there]


def continue_texts(model: LanguageModel, vocabulary: Vocabulary, where: str, options: Namespace) -> None:
    """Continue the prompts and write the texts to stdout. where: the snapshot's folder, for messages."""
    if not isinstance(vocabulary, TextVocabulary):
        raise UserError(f"{where}: this model's tokens are not text, so it can't continue one: choose another model")
    try:
        prompts = [vocabulary.encode(prompt) for prompt in prompts_of(options, vocabulary)]
    except UserError as error:
        if options.prompt or options.file:
            raise
        raise UserError("give --prompt: the default, a line feed, is not in this model's vocabulary") from error
    if not all(prompts) or not prompts:
        raise UserError(f"--file {options.file}: it holds nothing to continue: give at least one character")
    texts = [Text(prompt, number, [*prompt]) for prompt in prompts for number in range(options.samples)]
    began = time.perf_counter()
    write(model, vocabulary, texts, options)
    if options.speed:
        count, seconds = len(texts) * options.tokens, time.perf_counter() - began
        complain(f"{count:,} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens/s")


def generate_command(options: Namespace) -> int:
    if found := problems(options):
        raise UserError(*found)
    device = device_of(options.device)
    opened = open_model(options.url, options.step, ema=options.ema)
    opened.model.to(device)
    try:
        continue_texts(opened.model, opened.vocabulary, opened.where, options)
    except FloatingPointError as error:
        raise UserError(f"{opened.where}: {error}: its run has diverged; choose another with --step") from error
    return 0
