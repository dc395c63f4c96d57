"""From the data section of a config to a Source: the one place that chooses by the kind of data."""

from mingpt.config.schema import Data, ImagesData, OwnData, QuestionData, RandomData, ShardsData, TextData
from mingpt.data.source import Source
from mingpt.data.vocabulary import Vocabulary


def open_source(data: Data, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
    """The data of `data.kind`, in samples of block_size tokens; validation in microbatches of micro_size samples.

    vocabulary: that of a snapshot, to be used in place of one made from the data.
    Raises UserError, naming the key, if the data can't be read, or does not fit.
    """
    # Each kind is imported in its own branch: some need packages that the others do without.
    match data:
        case TextData():
            from mingpt.data.text import open_text

            return open_text(data, block_size, micro_size, vocabulary)
        case ShardsData():
            from mingpt.data.shards import open_shards

            return open_shards(data, block_size, micro_size, vocabulary)
        case ImagesData():
            from mingpt.data.images.images import open_images

            return open_images(data, block_size, micro_size, vocabulary)
        case QuestionData():
            from mingpt.data.synthetic import open_questions

            return open_questions(data, block_size, micro_size, vocabulary)
        case RandomData():
            from mingpt.data.synthetic import open_random

            return open_random(data, block_size, vocabulary)
        case OwnData():
            from mingpt.data.own import open_own

            return open_own(data, block_size, micro_size)
    raise AssertionError(f"no source for {type(data).__name__}")
