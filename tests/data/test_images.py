"""Images as tokens: the files' formats, exact tokens, and that the answer is never told to who is to find it."""

import gzip
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from image_kit import idx, write_cifar, write_cifar_archive, write_idx
from mingpt.config import compose
from mingpt.data.images.images import Images, shifted
from mingpt.data.images.imagetokens import ImageTokens
from mingpt.data.kinds.images import ImagesData
from mingpt.data.padding import PaddedBatches
from mingpt.data.source import Source
from mingpt.data.vocabulary import Characters
from mingpt.errors import UserError
from mingpt.model.language import IGNORE


def opened(path: Path, block_size: int = 5, vocabulary: Any = None, **changes: object) -> Source:
    settings = {"path": str(path), "cache_dir": str(path.parent / "cache"), "codes": 16, "classes": 4}
    return ImagesData.model_validate(settings | changes).open(block_size, 4, vocabulary)


def tokens_of(source: Source) -> ImageTokens:
    assert isinstance(source.vocabulary, ImageTokens)
    return source.vocabulary


# --- the files ---


def test_plain_and_packed_files_hold_the_same(tmp_path: Path) -> None:
    plain, packed = opened(write_idx(tmp_path / "plain")), opened(write_idx(tmp_path / "packed", packed=True))
    assert plain.sha256 == packed.sha256
    assert plain.vocabulary == packed.vocabulary
    assert len(plain.train) == 60
    assert len(plain.validation) == 6


def test_a_folder_of_cifar_and_its_archive_hold_the_same(tmp_path: Path) -> None:
    folder = opened(write_cifar(tmp_path / "folder"), 65, classes=10)
    archive = opened(write_cifar_archive(tmp_path / "cifar-10-binary.tar.gz"), 65, classes=10)
    assert folder.sha256 == archive.sha256
    assert (len(folder.train), len(folder.validation)) == (20, 1)
    assert tokens_of(folder).shape == (32, 32, 3)


def test_cifars_planes_become_pixels(tmp_path: Path) -> None:
    source = opened(write_cifar(tmp_path / "cifar", 1), 65, classes=10)
    assert isinstance(source.train, Images)
    raw = (tmp_path / "cifar" / "data_batch_1.bin").read_bytes()
    record = source.train.records.mapped[0]
    assert record[0] == raw[0]
    pixel = record[1:].reshape(32, 32, 3)[2, 5]
    assert pixel.tolist() == [raw[1 + plane * 1024 + 2 * 32 + 5] for plane in range(3)]


def test_a_folder_may_be_at_any_url(tmp_path: Path) -> None:
    local = opened(write_idx(tmp_path / "images"))
    settings = {"path": f"file://{tmp_path}/images", "cache_dir": str(tmp_path / "other"), "codes": 16, "classes": 4}
    assert ImagesData.model_validate(settings).open(5, 4).sha256 == local.sha256


# --- samples ---


def test_a_sample_that_classifies_ends_with_the_label_and_is_not_told_it(tmp_path: Path) -> None:
    source = opened(write_idx(tmp_path / "images"), image_weight=0.25)
    kinds = tokens_of(source)
    tokens, targets, weights = source.train[[3, 7]]
    assert tokens.shape == targets.shape == weights.shape == (2, 5)
    assert tokens[:, 0].tolist() == [kinds.unknown] * 2
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert int(tokens[:, 1:].max()) < kinds.codes
    assert targets[:, -1].tolist() == [kinds.codes + label for label in labels_of(source, [3, 7])]
    assert weights.tolist() == [[0.25] * 4 + [1]] * 2
    assert source.answer_length == 1


def labels_of(source: Source, images: list[int]) -> list[int]:
    assert isinstance(source.train, Images)
    return [int(source.train.records.mapped[i, 0]) for i in images]


def test_a_sample_that_draws_begins_with_the_label_and_is_not_asked_it(tmp_path: Path) -> None:
    source = opened(write_idx(tmp_path / "images"), draw=True)
    kinds = tokens_of(source)
    assert len(source.train) == 120
    tokens, targets, _ = source.train[range(120)]
    label = torch.tensor(labels_of(source, list(range(60)))) + kinds.codes
    assert tokens[0::2, 0].tolist() == [kinds.unknown] * 60
    assert torch.equal(targets[0::2, -1], label)
    assert torch.equal(tokens[1::2, 0], label)
    assert targets[1::2, -1].tolist() == [IGNORE] * 60
    assert torch.equal(tokens[0::2, 1:], tokens[1::2, 1:])


def test_validation_asks_each_test_image_once_and_tells_no_label(tmp_path: Path) -> None:
    source = opened(write_idx(tmp_path / "images"), draw=True, shift=1)
    kinds = tokens_of(source)
    assert isinstance(source.validation, PaddedBatches)
    parts = [source.validation[i] for i in range(len(source.validation))]
    tokens, targets, _ = (torch.cat(column) for column in zip(*parts, strict=True))
    assert (tokens[:, 0] == kinds.unknown).all()
    assert (targets[:21, -1] >= kinds.codes).all()
    assert (targets[21:] == IGNORE).all()
    assert len(targets) == 24


def test_shifts_are_all_places_of_each_image(tmp_path: Path) -> None:
    source = opened(write_idx(tmp_path / "images"), shift=1, draw=True)
    assert len(source.train) == 60 * 9 * 2
    tokens, _, _ = source.train[range(18)]  # all of image 0
    assert len({tuple(row) for row in tokens[::2, 1:].tolist()}) > 1
    unmoved = opened(tmp_path / "images").train[[0]][0]
    assert torch.equal(tokens[2 * 4, 1:], unmoved[0, 1:])  # the place in the middle


def test_an_image_is_moved_and_black_comes_in() -> None:
    image = np.arange(1, 10, dtype=np.uint8).reshape(1, 3, 3, 1)
    one, other = (shifted(image, 1, np.array([d]), np.array([r]))[0, ..., 0].tolist() for d, r in ((2, 1), (1, 0)))
    assert one == [[0, 0, 0], [1, 2, 3], [4, 5, 6]]
    assert other == [[2, 3, 0], [5, 6, 0], [8, 9, 0]]


def test_a_sample_is_a_function_of_its_number(tmp_path: Path) -> None:
    source = opened(write_idx(tmp_path / "images"), shift=2, draw=True)
    ids = [len(source.train) - 1, 3, 0, 77]
    pickled = pickle.dumps(source.train)
    assert len(pickled) < 4000  # the file's name and the codebook travel, the images don't
    apart = [pickle.loads(pickled)[[i]] for i in ids]
    for whole, parts in zip(source.train[ids], zip(*apart, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))


# --- the cache, and vocabularies that come with a snapshot ---


def test_the_codebook_is_the_same_without_the_cache(tmp_path: Path) -> None:
    write_idx(tmp_path / "images")
    first, second = (opened(tmp_path / "images", cache_dir=str(tmp_path / name)) for name in ("a", "b"))
    assert tokens_of(first).codebook == tokens_of(second).codebook
    assert first.sha256 == second.sha256


def test_files_are_read_once_a_node_and_again_when_they_change(tmp_path: Path) -> None:
    write_idx(tmp_path / "images")
    first = opened(tmp_path / "images")
    assert len(list((tmp_path / "cache").glob("images-*.npy"))) == 1
    opened(tmp_path / "images", image_weight=3.0, shift=2)  # what is cached does not depend on these
    assert len(list((tmp_path / "cache").glob("images-*.npy"))) == 1
    write_idx(tmp_path / "images", train=50)
    assert opened(tmp_path / "images").sha256 != first.sha256


def test_a_snapshots_codebook_is_kept(tmp_path: Path) -> None:
    theirs = tokens_of(opened(write_idx(tmp_path / "theirs", train=40)))
    ours = opened(write_idx(tmp_path / "ours"))
    assert theirs != ours.vocabulary
    kept = opened(tmp_path / "ours", vocabulary=theirs, codes=9, patch=2)
    assert kept.vocabulary == theirs
    assert kept.sha256 == ours.sha256  # the content is the same, told in other tokens
    images = kept.train.records.mapped[:1, 1:].reshape(1, 8, 8, 1) if isinstance(kept.train, Images) else None
    assert images is not None
    assert kept.train[[0]][0][0, 1:].tolist() == theirs.encode(images)[0].tolist()


def test_a_snapshots_vocabulary_of_another_kind_or_shape_is_a_mistake(tmp_path: Path) -> None:
    write_idx(tmp_path / "images")
    with pytest.raises(
        UserError, match=r"^data\.path=.*: the snapshot's vocabulary cannot encode images: take data of"
    ):
        opened(tmp_path / "images", vocabulary=Characters("ab"))
    with pytest.raises(UserError, match=r"images of 8 x 8 x 1 in 4 classes, but the snapshot's .* 4 x 4 x 1 in 4"):
        opened(tmp_path / "images", vocabulary=ImageTokens((4, 4, 1), 2, 4, b"abcd"))


# --- bad input ---

Damage = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train-images-idx3-ubyte", lambda raw: b"\0\0\x08\x01" + raw[4:],
         "train-images-idx3-ubyte begins with 00000801, not with 00000803 as images do (it holds labels): get"),
        ("t10k-labels-idx1-ubyte", lambda raw: b"\x1f\x8b" + raw[2:],
         "t10k-labels-idx1-ubyte begins with 1f8b0801, not with 00000801 as labels do (it is not an IDX file)"),
        ("train-images-idx3-ubyte", lambda raw: b"", "begins with , not with 00000803"),
        ("train-images-idx3-ubyte", lambda raw: raw[:-1],
         "has 3855 bytes, but its first 16 announce 3856 (60 x 8 x 8 images): get the file again"),
        ("t10k-images-idx3-ubyte", lambda raw: idx(np.zeros((0, 8, 8), np.uint8)),
         "t10k-images-idx3-ubyte announces 0 x 8 x 8 images, so it has none: get the file again"),
        ("t10k-labels-idx1-ubyte", lambda raw: raw[:6], "has 6 bytes, but its first 8 announce"),
        ("train-labels-idx1-ubyte", lambda raw: idx(np.zeros(59, np.uint8)),
         "60 images in train-images-idx3-ubyte, but 59 labels in train-labels-idx1-ubyte: take both from one data set"),
        ("train-labels-idx1-ubyte", lambda raw: raw[:-1] + b"\4",
         "the label of training image 59 is 4, beyond 0 to 3: raise data.classes=4, or get the files again"),
        ("t10k-labels-idx1-ubyte", lambda raw: raw[:8] + b"\xff" + raw[9:], "the label of test image 0 is 255, beyond"),
        ("t10k-images-idx3-ubyte", lambda raw: idx(np.zeros((21, 4, 4), np.uint8)),
         "images of 8 x 8 in train-images-idx3-ubyte, of 4 x 4 in t10k-images-idx3-ubyte: take both from one data set"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_a_mistake_that_names_it(tmp_path: Path, name: str, damage: Damage, message: str) -> None:
    path = write_idx(tmp_path / "images") / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as mistake:
        opened(tmp_path / "images")
    assert str(mistake.value).startswith(f"data.path={tmp_path}/images")
    assert message in str(mistake.value)


@pytest.mark.parametrize(
    "damage", [lambda raw: b"no gzip", lambda raw: raw[:-9], lambda raw: raw[:30] + b"x" + raw[31:]]
)
def test_a_file_that_is_no_gzip_is_a_mistake(tmp_path: Path, damage: Damage) -> None:
    path = write_idx(tmp_path / "images", packed=True) / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        UserError, match=r"train-images-idx3-ubyte\.gz: not a gzip file, or damaged \(.*\): get the file"
    ):
        opened(tmp_path / "images")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (write_idx(tmp_path / "images") / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte is missing there"):
        opened(tmp_path / "images")
    (write_cifar(tmp_path / "cifar") / "data_batch_4.bin").unlink()
    with pytest.raises(UserError, match=r"data_batch_4\.bin is missing there"):
        opened(tmp_path / "cifar")


def test_a_folder_without_images_is_a_mistake(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=rf"^data\.path={place}: no images there: name a folder with train-images"):
            opened(place)


def test_records_of_a_wrong_size_are_a_mistake(tmp_path: Path) -> None:
    path = write_cifar(tmp_path / "cifar") / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"data_batch_2\.bin has 12291 bytes, not a multiple of 3073"):
        opened(tmp_path / "cifar")


def test_an_archive_that_is_none_or_lacks_files_is_a_mistake(tmp_path: Path) -> None:
    path = write_cifar_archive(tmp_path / "cifar-10-binary.tar.gz")
    whole = path.read_bytes()
    for content in (b"no archive", whole[: len(whole) // 2], gzip.compress(b"no tar")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"cifar-10-binary\.tar\.gz: not a \.tar\.gz, or damaged"):
            opened(path)
    path.write_bytes(gzip.compress(bytes(10240)))  # an archive with nothing in it
    with pytest.raises(UserError, match=r"data_batch_1\.bin, .* is not in it: take cifar-10-binary\.tar\.gz"):
        opened(path)


def test_a_patch_that_does_not_fit_is_a_mistake(tmp_path: Path) -> None:
    write_idx(tmp_path / "images")
    with pytest.raises(UserError, match=r"^data\.patch=3 does not divide .* 8 x 8: choose one of 1, 2, 4, 8$"):
        opened(tmp_path / "images", patch=3)
    with pytest.raises(UserError, match=r"^model\.block_size=4 is too short: .* are 5: set model\.block_size=5, or"):
        opened(tmp_path / "images", block_size=4)


def test_drawing_without_weight_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"^data\.draw=true, but data\.image_weight=0 teaches no drawing"):
        compose.configure(["data=mnist", "data.draw=true", "data.image_weight=0"])


def test_identities_are_hashes(tmp_path: Path) -> None:
    source = opened(write_idx(tmp_path / "images"))
    assert len(source.sha256) == len(hashlib.sha256().hexdigest())
