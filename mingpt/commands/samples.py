"""A training sample for people: its text."""

from dataclasses import asdict
from typing import Any

from mingpt.cli.console import shortened
from mingpt.data.source import TextVocabulary, Vocabulary
from mingpt.replay.closeup import Sample

MOST = 500  # characters of a sample


def shown_sample(sample: Sample, vocabulary: Vocabulary) -> dict[str, Any]:
    """JSON: what is known of the sample, and `text`."""
    known = {k: v for k, v in asdict(sample).items() if k != "tokens"}
    if isinstance(vocabulary, TextVocabulary):
        text = vocabulary.decode([token for token in sample.tokens if token < vocabulary.size])
    else:
        text = " ".join(map(str, sample.tokens))
    return known | {"text": shortened(text, MOST)}
