"""What a config's `data` section describes, opened."""

from mingpt.config.datasets import ChatData, MixData, OwnData, RandomData, ShardsData, TextData
from mingpt.config.kinds import Data
from mingpt.data.chat import open_chat
from mingpt.data.mixture import open_mix
from mingpt.data.own import open_own
from mingpt.data.shards import open_shards
from mingpt.data.source import Source, Vocabulary
from mingpt.data.synthetic import open_random
from mingpt.data.text import open_text


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
            return open_mix(config, block_size, micro_size, vocabulary)
        case RandomData():
            return open_random(config, block_size, vocabulary)
        case OwnData():
            return open_own(config, block_size, micro_size)
    raise TypeError(type(config))
