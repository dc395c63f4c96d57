"""Small vocabularies of both forms, made here: no test but one needs GPT-2's own."""

import json
from pathlib import Path

from mingpt.data.bpe import END_OF_TEXT, GPT2Tokens

# "Ġ" is how GPT-2's files write a space.
MERGES = (
    "Ġ t",
    "h e",
    "Ġt he",
    "i n",
    "Ġ k",
    "in g",
    "Ġk ing",
    "o e",
    "Ġ w",
    "Ġw oe",
    "l o",
    "lo n",
    "lon g",
    "Ġ 1",
    "Ġ !",
)
TEXT = "#version: 0.2\n" + "\n".join(MERGES) + "\n"


def numbers() -> dict[str, int]:
    """What encoder.json says for MERGES."""
    plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in plain]
    letters = [*map(chr, plain), *(chr(256 + i) for i in range(len(others)))]
    tokens = [*letters, *(m.replace(" ", "") for m in MERGES), END_OF_TEXT]
    return {token: i for i, token in enumerate(tokens)}


def write_gpt2(folder: Path) -> Path:
    """GPT-2's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.bpe").write_text(TEXT, encoding="utf-8")
    (folder / "encoder.json").write_text(json.dumps(numbers()))
    return folder


def write_tokenizer(folder: Path, *specials: str) -> Path:
    """The same vocabulary as Hugging Face's tokenizer.json, with what a user's may have besides, such as specials."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [(first, second) for first, second in (m.split() for m in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab=numbers(), merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END_OF_TEXT, *specials)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def small() -> GPT2Tokens:
    """GPT-2's vocabulary with a few of its merges, made from TEXT."""
    return GPT2Tokens(TEXT)
