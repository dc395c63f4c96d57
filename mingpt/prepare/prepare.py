"""`mingpt prepare SOURCES… --out URL --tokenizer …`: text, JSON lines or Parquet to token shards.

SOURCES are files and globs at any fsspec URLs, hf://datasets/OWNER/NAME/*.parquet too, and @LIST: a file or URL with
one of them a line. *.gz, *.bz2 and *.xz are unpacked. The result depends on the sources and the options alone, not on
the number of processes or of interruptions. After a kill, the same command goes on after the last finished file. Train
on the result with data=shards data.path=URL.
"""

import argparse
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import get_args

from filelock import FileLock, Timeout

from mingpt.command import command, program
from mingpt.console import say
from mingpt.data.bpe import read_tokenizer
from mingpt.data.dataset import MANIFEST, SPLITS, DataSet, dtype_for, to_bytes, tokens_in
from mingpt.errors import FINISHED, TransientError, UserError
from mingpt.prepare.documents import Options, blocks
from mingpt.prepare.encoding import Tokenizer, encoded
from mingpt.prepare.finished import Sources, Stopped, commits_of, finished, hash_of
from mingpt.prepare.progress import Progress
from mingpt.prepare.shardwriter import SOURCES, ShardWriter
from mingpt.prepare.sources import File, Form, find_files, identity_of
from mingpt.redact import without_secrets
from mingpt.storage import is_local, open_fs, place

RECORD_BYTES, RECORD_SECONDS = 4 << 20, 0.25  # progress is recorded after a file, if so much was read or so long passed
THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
BAD_SHOWN = 20  # bad lines that are printed; further ones are only counted


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
    most: int = 0,
) -> DataSet:
    """Write the data set to the URL `out`, or resume writing it; returns its manifest.

    sources: URLs and globs. form: of all files; None: as their names end. skip_bad: how many unreadable lines of JSON
    may be left out. most: end with the document with which there are so many tokens, of both splits; 0: read all.
    Raises UserError where the user must act, TransientError where a store fails.
    """
    fs, path = open_fs(out, "--out")
    home = Path(path) if is_local(fs) else _home(out)
    with place("--out", out):
        commits = commits_of(fs, path, home)
    files = find_files(sources, form, commits)
    plan = hash_of(
        [[identity_of(file.url), file.form, file.size] for file in files],
        asdict(options),
        tokenizer.to_json(),
        shard_tokens,
        *([most] if most else []),
    )
    seen = [[str(without_secrets(file.url)), file.version] for file in files]
    versions = hash_of(plan, seen)
    with place("--out", out):
        if there := finished(out, fs, path, files, options, plan, versions if all(v for _, v in seen) else ""):
            return there
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
            writer = ShardWriter(out, home, dtype, tokenizer.end_of_text, shard_tokens, versions, commits)
            content, stopped = _write(writer, files, tokenizer, options, processes, skip_bad, most)
            shards = writer.close()
            if not any(shard.split == "train" for shard in shards):
                raise UserError("SOURCES hold no text to train on: name others, or lower --val-fraction")
            made_from = hash_of(plan, content)
            dataset = DataSet(dtype=dtype, tokenizer=tokenizer.to_json(), made_from=made_from, shards=shards)
            writer.put(SOURCES, Sources(made_from, versions, commits, stopped).to_bytes())
            writer.put(MANIFEST, to_bytes(dataset))
            writer.clean()
        (home / "prepare.lock").unlink(missing_ok=True)
        if not is_local(fs):
            with suppress(OSError):
                home.rmdir()
    return dataset


def _home(out: str) -> Path:
    """Shards are appended to, which object stores cannot do: those of a remote data set grow on this machine's disk."""
    return Path.home() / f".cache/mingpt/prepare-{hash_of(out)[:16]}"


def _write(
    writer: ShardWriter,
    files: Sequence[File],
    tokenizer: Tokenizer,
    options: Options,
    processes: int,
    skip_bad: int,
    most: int,
) -> tuple[str, Stopped | None]:
    """Returns a hash of the content that was read, and where `most` tokens ended it."""
    progress = Progress(files, most, writer.files, writer.tokens)
    if writer.files:
        say(f"prepare: going on after {writer.files} of {len(files)} files")
    numbers = {file.url: i for i, file in enumerate(files)}
    work = (block for file in files[writer.files :] for block in blocks(file, options))
    content, bad, last, taken = writer.content, writer.bad, "", 0
    current, recorded_at, since, stop = writer.files, time.monotonic(), 0, None
    with closing(encoded(work, tokenizer, options, processes, skip_bad)) as results:
        for block, result in results:
            if (number := numbers[block.file.url]) != current:
                content = hash_of(content, last)
                if since >= RECORD_BYTES or time.monotonic() - recorded_at >= RECORD_SECONDS:
                    writer.record(number, content, bad)
                    recorded_at, since = time.monotonic(), 0
                current, taken = number, 0
            last, taken = block.content, taken + 1
            bad = _left_out(result.bad, bad, skip_bad, progress)
            stop = result.up_to(most - writer.tokens, writer.dtype.itemsize) if most else None
            rows = (stop or result).rows
            for split, raw in rows.items():
                writer.add(split, raw)
            since += block.size
            progress.add(block.size, sum(map(len, rows.values())) // writer.dtype.itemsize)
            if stop:
                break
    progress.clear()
    if taken:
        content = hash_of(content, last)
    if not stop:
        writer.record(len(files), content, bad)
    if bad:
        say(f"prepare: {bad} bad lines left out")
    if most:
        here = f"{writer.tokens:,} tokens, {writer.documents:,} documents"
        say(
            f"prepare: stopped at {here} (--tokens {most:,}), in file {current + 1} of {len(files)}"
            if stop
            else f"note: the sources hold only {here}, fewer than --tokens {most:,}"
        )
    return content, (current, taken) if stop else None


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


def token_count(text: str) -> int:
    """10B, 500M, 1.5k or 1_000_000. Raises ValueError."""
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([kmbt]?)", text.strip(), re.I)
    if not found or not (count := int(Decimal(found[1]) * THOUSANDS[found[2].lower()])):
        raise ValueError
    return count


def parser() -> argparse.ArgumentParser:
    # imports Hydra; at the top, each encoding process would import it, too
    from mingpt.config.commandline import Parser

    parser = Parser(
        prog=program("mingpt.data.prepare"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCES", help="files, globs or @LIST: text, JSON lines, Parquet"
    )
    parser.add_argument("--out", required=True, metavar="URL", help="the data set's folder")
    parser.add_argument("--tokenizer", required=True, metavar="URL", help="GPT-2's vocab.bpe, or a tokenizer.json")
    parser.add_argument("--form", choices=get_args(Form), help="of all files (default: as their names end)")
    parser.add_argument("--field", default="text", help="field or column with the text (default: text)")
    parser.add_argument("--separator", default="", help="between the documents of a text file (default: one a file)")
    parser.add_argument(
        "--val-fraction", type=float, default=0.01, help="share of documents that validate (default: 0.01)"
    )
    parser.add_argument(
        "--tokens",
        default="",
        metavar="N",
        help="end with the document that makes it N, as in 10B or 500M (default: read all)",
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
    try:
        most = token_count(given.tokens) if given.tokens else 0
    except ValueError:
        problems.append(f"--tokens {given.tokens}: give a number above 0, as in 10B, 500M or 1_000_000")
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
            most=most,
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
