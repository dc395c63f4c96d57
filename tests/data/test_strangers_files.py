"""A data set, a tokenizer and weights may be a stranger's: no file in their folders leads to another one, or blocks."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mingpt.config.datasets import ShardsData
from mingpt.data.bpe import read_tokenizer
from mingpt.data.shards import open_shards
from mingpt.data.source import Vocabulary
from mingpt.data.template import read_template
from mingpt.data.vocabulary import Numbers
from mingpt.errors import UserError
from mingpt.weights.fitting import form_of
from mingpt.weights.reading import read_weights
from tests.kits import bpe_kit
from tests.kits.prepare_kit import prepared, some_texts, write_jsonl
from tests.kits.weights_kit import WORDS, ours, saved


def prepared_shards(folder: Path) -> None:
    prepared([write_jsonl(folder.parent / "texts.jsonl", some_texts(20))], folder, val_fraction=0.1)


def nanogpt(folder: Path) -> None:
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes(np.arange(100, dtype="<u2").tobytes())


def gpt2(folder: Path) -> None:
    bpe_kit.write_gpt2(folder)


def tokenizer(folder: Path) -> None:
    bpe_kit.write_tokenizer(folder)


def template(folder: Path) -> None:
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))


def jinja(folder: Path) -> None:
    folder.mkdir()
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def weights(folder: Path) -> None:
    saved(folder)
    tokenizer_of_numbers = {"model": {"vocab": {str(i): i for i in range(WORDS)}}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_of_numbers))


def vocabulary(place: Path) -> Vocabulary:
    return read_tokenizer(str(place), "data.tokenizer")


def read_shards(folder: Path) -> object:
    data = {"path": str(folder), "cache_dir": str(folder.parent / "cache")}
    return open_shards(ShardsData.model_validate(data), 8, 1).train[[0]]


READERS: dict[Callable[[Path], None], tuple[str, Callable[[Path], object]]] = {
    prepared_shards: ("data.path", read_shards),
    nanogpt: ("data.path", read_shards),
    gpt2: ("data.tokenizer", vocabulary),
    tokenizer: ("data.tokenizer", vocabulary),
    template: ("data.template", lambda folder: read_template(str(folder))),
    jinja: ("data.template", lambda folder: read_template(str(folder))),
    weights: ("model.init_from", lambda folder: read_weights(str(folder), form_of(ours()), Numbers(WORDS)).sha256),
}
FILES = [
    (prepared_shards, "manifest.json"),
    (prepared_shards, "train-00000.bin"),
    (prepared_shards, "validation-00000.bin"),
    (nanogpt, "train.bin"),
    (nanogpt, "val.bin"),
    (gpt2, "vocab.bpe"),
    (tokenizer, "tokenizer.json"),
    (template, "tokenizer_config.json"),
    (jinja, "chat_template.jinja"),
    (weights, "config.json"),
    (weights, "model.safetensors"),
    (weights, "tokenizer.json"),
]


@pytest.mark.parametrize(("write", "name"), FILES, ids=[f"{write.__name__}-{name}" for write, name in FILES])
def test_a_link_and_a_pipe_in_a_folder_are_refused_and_a_byte_order_mark_is_no_part_of_a_file(
    tmp_path: Path, write: Callable[[Path], None], name: str
) -> None:
    key, read = READERS[write]
    write(folder := tmp_path / "theirs")
    before = str(read(folder))
    (tmp_path / "link").symlink_to(folder)
    read(tmp_path / "link")  # which the user has named
    if not name.endswith((".bin", ".safetensors")):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
        after = str(read(folder))
        assert after == before or write is weights  # a hash of its files, by which a resume knows them
    (folder / name).rename(private := tmp_path / "private")
    (folder / name).symlink_to(private)
    with pytest.raises(UserError, match=rf"^{key}=.*/{name} is a link"):
        read(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=rf"^{key}=.*/{name} is not a regular file"):
        read(folder)


def test_a_file_that_a_user_names_may_be_a_link_but_no_pipe(tmp_path: Path) -> None:
    tokenizer(tmp_path / "there")
    (tmp_path / "mine.json").symlink_to("there/tokenizer.json")
    assert vocabulary(tmp_path / "mine.json").size == 272
    jinja(tmp_path / "elsewhere")
    (tmp_path / "mine.jinja").symlink_to("elsewhere/chat_template.jinja")
    assert read_template(str(tmp_path / "mine.jinja")) == "{{ messages }}"
    os.mkfifo(tmp_path / "pipe")
    for write in (tokenizer, jinja):
        with pytest.raises(UserError, match=r"/pipe is not a regular file"):
            READERS[write][1](tmp_path / "pipe")


def test_links_of_the_hubs_cache_are_followed_to_its_own_files_alone(tmp_path: Path) -> None:
    """SNAPSHOTS/COMMIT/NAME -> ../../blobs/HASH, as Hugging Face's client writes it."""
    (blobs := tmp_path / "models--a--b/blobs").mkdir(parents=True)
    folder = tmp_path / "models--a--b/snapshots/1234"
    bpe_kit.write_tokenizer(folder).rename(blobs / "ab12")
    (folder / "tokenizer.json").symlink_to("../../blobs/ab12")
    assert vocabulary(folder).size == 272
    blobs.rename(other := tmp_path / "other")
    blobs.symlink_to(other)
    with pytest.raises(UserError, match=r"/blobs is a link"):
        vocabulary(folder)
    blobs.unlink()
    blobs.mkdir()
    (blobs / "ab12").symlink_to(other / "ab12")
    with pytest.raises(UserError, match=r"/ab12 is a link"):
        vocabulary(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("../../../other/ab12")
    with pytest.raises(UserError, match=r"/tokenizer\.json is a link"):
        vocabulary(folder)
