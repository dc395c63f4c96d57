"""What a config's `data` section describes, opened."""

import json
from hashlib import sha256

from mingpt.compute.mixture import Mixture, shares
from mingpt.config.datasets import ChatData, MixData, OwnData, RandomData, ShardsData, TextData
from mingpt.config.kinds import Data
from mingpt.data.chat import open_chat
from mingpt.data.mixed import MixedSamples, MixedSplit, named
from mingpt.data.own import open_own
from mingpt.data.shards import open_shards
from mingpt.data.source import EvalSplit, Samples, Source, Vocabulary
from mingpt.data.synthetic import open_random
from mingpt.data.text import open_text
from mingpt.errors import UserError


def open_data(config: Data, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
    """The data in samples of block_size tokens; validation in microbatches of micro_size samples.

    vocabulary: that of a snapshot, to be used in place of one made from the data.
    Raises UserError, naming the key, if the data can't be read, or does not fit.
    """
    match config:
        case TextData():
            return open_text(config, block_size, micro_size, vocabulary)
        case ShardsData():
            return open_shards(config, block_size, micro_size, vocabulary)
        case ChatData():
            return open_chat(config, block_size, micro_size, vocabulary)
        case MixData():
            return _open_mix(config, block_size, micro_size, vocabulary)
        case RandomData():
            return open_random(config, block_size, vocabulary)
        case OwnData():
            return open_own(config, block_size, micro_size)
    raise TypeError(type(config))


def _open_mix(config: MixData, block_size: int, micro_size: int, vocabulary: Vocabulary | None) -> Source:
    """Several data sets as one (mixed.py), once each of them is there and all have one vocabulary.

    Raises UserError, which lists the problems of all components, or names two with different vocabularies."""
    found, problems, parts = dict[str, Source](), list[str](), config.parts()
    for key, part in parts.items():
        try:
            with named(key, part):
                found[key] = open_data(part, block_size, micro_size, vocabulary)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    (first, source), *others = found.items()
    for key, other in others:
        if other.vocabulary.to_json() != source.vocabulary.to_json():
            raise UserError(
                f"{first} and {key} have different vocabularies ({_about(source)} and {_about(other)}): make the "
                f"tokens of both with one tokenizer, or use bytes; nanoGPT's files need {first}.tokenizer and "
                f"{key}.tokenizer"
            )
    train, validation = dict[str, tuple[Data, Samples]](), dict[str, tuple[Data, EvalSplit]]()
    content, sizes = list[list[str]](), list[tuple[str, int]]()
    for key, each in found.items():
        name = key.rpartition(".")[2]
        train[key] = parts[key], each.train
        validation[key] = parts[key], each.validation
        content.append([name, each.sha256])
        sizes.append((name, len(each.train)))
    phases = [(step, shares([*weights.values()])) for step, weights in config.phases()]
    return Source(
        MixedSamples(train),
        MixedSplit(validation),
        source.vocabulary,
        sha256(json.dumps(content).encode()).hexdigest(),
        mixture=Mixture(tuple(sizes), tuple(phases)),
    )


def _about(source: Source) -> str:
    return f"{source.vocabulary.to_json()['kind']}, {source.vocabulary.size} tokens"
