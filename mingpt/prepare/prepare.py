"""`mingpt prepare SOURCES… --out URL --tokenizer …`: text, JSON lines or Parquet to token shards.

SOURCES are files and globs at any fsspec URLs; *.gz, *.bz2 and *.xz are unpacked. The result depends on the sources and
the options alone, not on the number of processes or of interruptions. After a kill, the same command goes on after the
last finished file. Train on the result with data=shards data.path=URL.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import numpy as np
from filelock import FileLock, Timeout

from mingpt.command import command, program
from mingpt.console import say
from mingpt.data.bpe import read_tokenizer
from mingpt.data.dataset import (
    MANIFEST,
    SPLITS,
    DataSet,
    Shard,
    dtype_for,
    from_bytes,
    read_manifest,
    to_bytes,
    tokens_in,
)
from mingpt.errors import FINISHED, TransientError, UserError
from mingpt.prepare.documents import Options, blocks
from mingpt.prepare.encoding import Tokenizer, encoded
from mingpt.prepare.shardwriter import SOURCES, ShardWriter
from mingpt.prepare.sources import File, Form, find_files, identity_of
from mingpt.redact import without_secrets
from mingpt.storage import is_local, open_fs, place

RECORD_BYTES, RECORD_SECONDS = 4 << 20, 0.25  # progress is recorded after a file, if so much was read or so long passed
BAD_SHOWN = 20  # bad lines that are printed; further ones are only counted
LOG_SECONDS, DRAW_SECONDS = 10.0, 0.1  # between two lines of a log; between two updates of the bar


class Progress:
    """Shows the progress: a bar on a terminal, a line every LOG_SECONDS in a log."""

    def __init__(self, files: Sequence[File]) -> None:
        self.total = max(1, sum(file.size for file in files))
        self.bytes = self.tokens = self.skipped = 0
        self.began = self.last = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def skip(self, files: Sequence[File]) -> None:
        self.bytes = self.skipped = sum(file.size for file in files)

    def add(self, size: int, tokens: int) -> None:
        self.bytes, self.tokens = self.bytes + size, self.tokens + tokens
        now = time.monotonic()
        if now - self.last >= (DRAW_SECONDS if self.terminal else LOG_SECONDS):
            self.last = now
            self.show()

    def show(self) -> None:
        share = min(1.0, self.bytes / self.total)
        seconds = max(1e-9, time.monotonic() - self.began)
        speed = (self.bytes - self.skipped) / seconds
        left = (self.total - self.bytes) / speed if speed else 0.0
        line = f"{share:4.0%}  {speed / 1e6:.1f} MB/s  {self.tokens:,} tokens  {max(0.0, left):.0f} s left"
        if self.terminal:
            print(f"\r\033[K[{'#' * int(share * 30):<30}] {line}", end="", file=sys.stderr, flush=True)
        else:
            say(f"prepare: {line}")

    def clear(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def prepare(
    sources: Sequence[str],
    out: str,
    tokenizer: Tokenizer,
    options: Options,
    *,
    form: Form | None = None,
    shard_tokens: int = 1 << 25,
    processes: int = 1,
    skip_bad: int = 0,
) -> DataSet:
    """Write the data set to the URL `out`, or resume writing it; returns its manifest.

    sources: URLs and globs. form: of all files; None: as their names end. skip_bad: how many unreadable lines of JSON
    may be left out. Raises UserError where the user must act, TransientError where a store fails.
    """
    files = find_files(sources, form)
    plan = _hash(
        [[identity_of(file.url), file.form, file.size] for file in files],
        asdict(options),
        tokenizer.to_json(),
        shard_tokens,
    )
    seen = [[str(without_secrets(file.url)), file.version] for file in files]
    versions = _hash(plan, seen)
    fs, path = open_fs(out, "--out")
    with place("--out", out):
        if there := _finished(out, fs, path, files, options, plan, versions if all(v for _, v in seen) else ""):
            return there
        # Shards are appended to, which object stores cannot do: those of a remote data set grow on this machine's disk.
        home = Path(path) if is_local(fs) else Path.home() / f".cache/mingpt/prepare-{_hash(out)[:16]}"
        home.mkdir(parents=True, exist_ok=True)
        lock = FileLock(home / "prepare.lock", timeout=0)
        with ExitStack() as held:
            try:
                held.enter_context(lock)
            except Timeout:
                raise UserError(
                    f"--out={without_secrets(out)}: another `mingpt prepare` is writing there: wait until it ends"
                ) from None
            dtype = dtype_for(tokenizer.size)
            writer = ShardWriter(out, home, dtype, tokenizer.end_of_text, shard_tokens, versions)
            _write(writer, files, tokenizer, options, processes, skip_bad)
            shards = writer.close()
            if not any(shard.split == "train" for shard in shards):
                raise UserError("SOURCES hold no text to train on: name others, or lower --val-fraction")
            made_from = _hash(plan, writer.content)
            dataset = DataSet(dtype=dtype, tokenizer=tokenizer.to_json(), made_from=made_from, shards=shards)
            writer.put(SOURCES, json.dumps({"made_from": made_from, "versions": versions}).encode())
            writer.put(MANIFEST, to_bytes(dataset))
            writer.clean()
        (home / "prepare.lock").unlink(missing_ok=True)
        if not is_local(fs):
            with suppress(OSError):
                home.rmdir()
    return dataset


def _finished(
    out: str, fs: Any, path: str, files: Sequence[File], options: Options, plan: str, versions: str
) -> DataSet | None:
    """The finished data set at `out`, if it was made from the same sources and options; None if it has to be made.

    versions: a hash of the sources' times and ETags; empty if a store gives none. Then, or if they have changed, the
    sources are read to compare their contents. Raises UserError if another data set is there.
    """
    if not (there := read_manifest(fs, path)):
        return None
    shown = f"--out={without_secrets(out)}"
    dataset = from_bytes(there, shown)
    recorded = read_manifest(fs, path, SOURCES) or b"{}"
    if not versions or recorded != json.dumps({"made_from": dataset.made_from, "versions": versions}).encode():
        say(f"prepare: {shown}: a data set is there; reading the sources to see whether it was made of them")
        if _hash(plan, _content_of(files, options)) != dataset.made_from:
            raise UserError(
                f"{shown}: another data set is there, of other sources or options, or of these before they changed: "
                "choose another folder"
            )
    if not (lost := [shard.name for shard in dataset.shards if not _is_there(fs, path, shard, dataset.dtype)]):
        say(f"prepare: {shown}: already there, made of these sources")
        return dataset
    say(f"prepare: {shown}: missing or of another size: {', '.join(lost)}: the data set is made again")
    return None


def _content_of(files: Sequence[File], options: Options) -> str:
    contents, content = dict[str, str](), ""
    for file in files:
        for _ in blocks(file, options, contents):
            pass
        content = _hash(content, contents.pop(file.url))
    return content


def _write(
    writer: ShardWriter, files: Sequence[File], tokenizer: Tokenizer, options: Options, processes: int, skip_bad: int
) -> None:
    progress = Progress(files)
    progress.skip(files[: writer.files])
    if writer.files:
        say(f"prepare: going on after {writer.files} of {len(files)} files")
    numbers = {file.url: i for i, file in enumerate(files)}
    contents, content, bad = dict[str, str](), writer.content, writer.bad
    work = (block for file in files[writer.files :] for block in blocks(file, options, contents))
    current, recorded_at, since = writer.files, time.monotonic(), 0
    for block, (rows, lines) in encoded(work, tokenizer, options, processes, skip_bad):
        number = numbers[block.file.url]
        if number != current:
            for file in files[current:number]:
                content = _hash(content, contents.pop(file.url))
            if since >= RECORD_BYTES or time.monotonic() - recorded_at >= RECORD_SECONDS:
                writer.record(number, content, bad)
                recorded_at, since = time.monotonic(), 0
            current = number
        bad = _left_out(lines, bad, skip_bad, progress)
        for split, raw in rows.items():
            writer.add(split, raw)
        since += block.size
        progress.add(block.size, sum(map(len, rows.values())) // writer.dtype.itemsize)
    progress.clear()
    for file in files[current:]:
        content = _hash(content, contents.pop(file.url))
    writer.record(len(files), content, bad)
    if bad:
        say(f"prepare: {bad} bad lines left out")


def _left_out(lines: Sequence[str], bad: int, skip_bad: int, progress: Progress) -> int:
    """Print a block's bad lines; returns how many there are in all. Raises UserError at the first beyond skip_bad."""
    for line in lines:
        bad += 1
        if bad > skip_bad:
            others = f", and {skip_bad} before it were left out" if skip_bad else ""
            raise UserError(f"{line}{others}; --skip-bad N leaves out up to N lines")
        if bad <= BAD_SHOWN:
            progress.clear()
            say(f"prepare: left out: {line}")
    return bad


def _hash(*parts: Any) -> str:
    return sha256(json.dumps(parts).encode()).hexdigest()


def _is_there(fs: Any, path: str, shard: Shard, dtype: str) -> bool:
    file = f"{path.rstrip('/')}/{shard.name}"
    return fs.isfile(file) and fs.info(file)["size"] == shard.tokens * np.dtype(dtype).itemsize


def parser() -> argparse.ArgumentParser:
    # imports Hydra; at the top, each encoding process would import it, too
    from mingpt.config.commandline import Parser

    parser = Parser(
        prog=program("mingpt.data.prepare"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCES", help="files or globs: text, JSON lines, Parquet")
    parser.add_argument("--out", required=True, metavar="URL", help="the data set's folder")
    parser.add_argument("--tokenizer", required=True, metavar="URL", help="GPT-2's vocab.bpe, or a tokenizer.json")
    parser.add_argument("--form", choices=get_args(Form), help="of all files (default: as their names end)")
    parser.add_argument("--field", default="text", help="field or column with the text (default: text)")
    parser.add_argument("--separator", default="", help="between the documents of a text file (default: one a file)")
    parser.add_argument(
        "--val-fraction", type=float, default=0.01, help="share of documents that validate (default: 0.01)"
    )
    parser.add_argument("--skip-bad", type=int, default=0, metavar="N", help="leave out up to N bad lines (default: 0)")
    parser.add_argument("--shard-tokens", type=int, default=1 << 25, help="tokens in a shard (default: 33554432)")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    return parser


@command("interrupted: the same command goes on")
def main(arguments: list[str]) -> int:
    given = parser().parse_args(arguments)
    fraction, tokens, processes = given.val_fraction, given.shard_tokens, given.processes
    problems = [
        *([f"--val-fraction {fraction}: from 0 to less than 1"] if not 0 <= fraction < 1 else []),
        *([f"--shard-tokens {tokens}: at least 1"] if tokens < 1 else []),
        *([f"--skip-bad {given.skip_bad}: at least 0"] if given.skip_bad < 0 else []),
        *([f"--processes {processes}: at least 1"] if processes < 1 else []),
    ]
    if problems:
        raise UserError(*problems)
    separator = given.separator.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")
    try:
        dataset = prepare(
            given.sources,
            given.out,
            read_tokenizer(given.tokenizer, "--tokenizer"),
            Options(separator, given.field, fraction),
            form=given.form,
            shard_tokens=tokens,
            processes=processes,
            skip_bad=given.skip_bad,
        )
    except BrokenProcessPool as error:
        raise TransientError(str(error)) from error
    for split in SPLITS:
        shards = dataset.of(split)
        documents = sum(shard.documents for shard in shards)
        say(f"{split}: {tokens_in(shards):,} tokens of {documents:,} documents in {len(shards)} shards")
    if fraction and not dataset.of("validation"):
        one = sum(shard.documents for shard in dataset.shards) == 1
        say(
            f"note: there is nothing to evaluate on: no document's hash falls into --val-fraction {fraction:g}: "
            + ("" if one else "raise it, or ")
            + r"cut the text into documents with --separator, as in '\n\n'"
        )
    say(f"train on it: data=shards data.path={without_secrets(given.out)}")
    return FINISHED
