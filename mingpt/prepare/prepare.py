"""`mingpt prepare SOURCES… --out URL --tokenizer …`: text, JSON lines, CSV or Parquet to token shards.

SOURCES are files and globs at any fsspec URLs, hf://datasets/OWNER/NAME/*.parquet too, and @LIST: a file with
one of them a line. *.gz and *.zst are unpacked. The result depends on the sources and the options alone,
not on the number of processes or of interruptions. After a kill, the same command goes on after the last finished file.
Train on the result with data=shards data.path=URL.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import asdict
from decimal import Decimal
from hashlib import sha256
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from mingpt.cli.console import say
from mingpt.data.bpe import read_tokenizer
from mingpt.data.dataset import MANIFEST, SPLITS, DataSet, Shard, dtype_for, from_bytes, to_bytes, tokens_in
from mingpt.errors import FINISHED, TransientError, UserError
from mingpt.files.folder import Folder
from mingpt.files.storage import place, without_query
from mingpt.prepare.documents import Options, blocks
from mingpt.prepare.encoding import Tokenizer, encoded
from mingpt.prepare.shardwriter import PROGRESS, SOURCES, Done, ShardWriter
from mingpt.prepare.sources import File, Form, find_files, identity_of

RECORD_SECONDS = 0.25  # between two records of the progress, which is recorded after a file
LOG_SECONDS = 10.0  # between two lines of a log


def prepare(
    sources: Sequence[str],
    out: str,
    tokenizer: Tokenizer,
    options: Options,
    *,
    form: Form | None = None,
    shard_tokens: int = 1 << 25,
    processes: int = 1,
    most: int = 0,
) -> DataSet:
    """Write the data set to the URL `out`, or resume writing it; returns its manifest.

    sources: URLs and globs. form: of all files; None: as their names end. most: end with the document with
    which there are so many tokens, of both splits; 0: read all.
    Raises UserError where the user must act, TransientError where a store fails.
    """
    folder = Folder(out, "--out")
    # Shards are appended to, which object stores cannot do: those of a remote data set grow on this machine's disk.
    home = Path(folder.root) if folder.local else Path.home() / f".cache/mingpt/prepare-{hash_of(out)[:16]}"
    with place("--out", out):
        commits = commits_of(folder, home)
    files = find_files(sources, form, commits)
    plan = hash_of(
        [[identity_of(file.url), file.form, file.size] for file in files],
        asdict(options),
        tokenizer.to_json(),
        shard_tokens,
        *([most] if most else []),
    )
    # A signature or a password in a URL changes, and the same files are the same files. Besides, the hash is published.
    places = [re.sub(r"://[^/]*@", "://", without_query(file.url)) for file in files]
    versions = hash_of(plan, places, [file.version for file in files])
    with place("--out", out):
        if there := finished(folder, files, options, plan, versions if all(f.version for f in files) else ""):
            return there
        home.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(home / "prepare.lock", timeout=0):
                dtype = dtype_for(tokenizer.size)
                writer = ShardWriter(out, home, dtype, tokenizer.end_of_text, shard_tokens, versions, commits)
                done = _write(writer, files, tokenizer, options, processes, most)
                shards = writer.close()
                if not any(shard.split == "train" for shard in shards):
                    raise UserError("SOURCES hold no text to train on: name others, or lower --val-fraction")
                made_from = hash_of(plan, done.content)
                about = {"made_from": made_from, "versions": versions, "commits": commits, "blocks": done.blocks}
                dataset = DataSet(dtype=dtype, tokenizer=tokenizer.to_json(), made_from=made_from, shards=shards)
                writer.put(SOURCES, json.dumps(about).encode())
                writer.put(MANIFEST, to_bytes(dataset))
                writer.clean()
        except Timeout:
            raise UserError(f"{folder.shown}: another `mingpt prepare` is writing there: wait until it ends") from None
        (home / "prepare.lock").unlink(missing_ok=True)
        if not folder.local:
            with suppress(OSError):
                home.rmdir()
    _tell(done, shards, most, len(files))
    return dataset


def _read(raw: bytes | None) -> dict[str, Any]:
    """A JSON object that may be damaged, or a stranger's; empty if it is none."""
    try:
        found = json.loads(raw or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def commits_of(folder: Folder, home: Path) -> dict[str, str]:
    """The commits that an earlier `mingpt prepare` has read, finished or not: the next one reads the same."""
    progress = Folder(str(home), "--out").read(PROGRESS)
    commits = _read(folder.read(SOURCES) if progress is None else progress).get("commits")
    return {str(k): str(v) for k, v in commits.items()} if isinstance(commits, dict) else {}


def finished(folder: Folder, files: Sequence[File], options: Options, plan: str, versions: str) -> DataSet | None:
    """The finished data set in a folder, if it was made from the same sources and options; None if it has to be made.

    versions: a hash of the sources' times and ETags; empty if a store gives none. Then, or if they have changed, the
    sources are read to compare their contents. Raises UserError if another data set is there.
    """
    if not (there := folder.read(MANIFEST)):
        return None
    shown = folder.shown
    dataset = from_bytes(there, shown)
    recorded = _read(folder.read(SOURCES))
    if not versions or (recorded.get("made_from"), recorded.get("versions")) != (dataset.made_from, versions):
        say(f"prepare: {shown}: a data set is there; reading the sources to see whether it was made of them")
        content, taken = "", recorded.get("blocks")
        every = blocks(files, options)
        for block in islice(every, taken if isinstance(taken, int) and taken > 0 else None):
            content = hash_of(content, block.pieces)
        if hash_of(plan, content) != dataset.made_from:
            raise UserError(
                f"{shown}: another data set is there, of other sources or options, or of these before they changed: "
                "choose another folder"
            )
    sizes, width = {name: entry["size"] for name, entry in folder.entries().items()}, np.dtype(dataset.dtype)
    if not (lost := [s.name for s in dataset.shards if sizes.get(s.name) != s.tokens * width.itemsize]):
        say(f"prepare: {shown}: already there, made of these sources")
        return dataset
    say(f"prepare: {shown}: missing or of another size: {', '.join(lost)}: the data set is made again")
    return None


def hash_of(*parts: Any) -> str:
    return sha256(json.dumps(parts).encode()).hexdigest()


def _tell(done: Done, shards: Sequence[Shard], most: int, files: int) -> None:
    if most:
        here = f"{tokens_in(shards):,} tokens, {sum(shard.documents for shard in shards):,} documents"
        say(
            f"prepare: stopped at {here} (--tokens {most:,}), in file {done.files} of {files}"
            if tokens_in(shards) >= most
            else f"note: the sources hold only {here}, fewer than --tokens {most:,}"
        )


def _write(
    writer: ShardWriter, files: Sequence[File], tokenizer: Tokenizer, options: Options, processes: int, most: int
) -> Done:
    """Add the documents of all files, or those up to the one with which there are `most` tokens."""
    done = writer.done
    if done.files:
        say(f"prepare: going on after {done.files} of {len(files)} files")
    before = [0, *accumulate(file.size for file in files)]  # bytes of the files before each
    recorded = time.monotonic()
    work = blocks(files, options, done.files)
    show = progress()
    with closing(encoded(work, tokenizer, processes)) as results:
        for block, rows in results:
            content = hash_of(done.content, block.pieces)
            done = Done(block.number + 1, done.blocks + 1, content)
            for piece, raw in zip(block.pieces, rows, strict=True):
                writer.add("validation" if piece.validation else "train", raw)
                if piece.ends and 0 < most <= writer.tokens:
                    return done
            share = (before[block.number] + block.read) / max(1, before[-1])
            show(max(share, writer.tokens / most if most else 0), writer.tokens)
            if block.last and time.monotonic() - recorded >= RECORD_SECONDS:
                writer.record(done)
                recorded = time.monotonic()
    writer.record(done)
    return done


def progress() -> Callable[[float, int], None]:
    """What prints a line now and then: the share that is done, and the tokens."""
    told = time.monotonic()

    def show(share: float, tokens: int) -> None:
        nonlocal told
        if time.monotonic() - told >= LOG_SECONDS:
            told = time.monotonic()
            say(f"prepare: {share:4.0%}  {tokens:,} tokens")

    return show


def token_count(text: str) -> int:
    """10B, 500M, 1.5k or 1_000_000. Raises ValueError."""
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([kmbt]?)", text.strip(), re.I)
    if not found or not (count := int(Decimal(found[1]) * 1000 ** " kmbt".index(found[2].lower() or " "))):
        raise ValueError
    return count


def prepare_command(given: argparse.Namespace) -> int:
    fraction, tokens, processes = given.val_fraction, given.shard_tokens, given.processes
    bounds = {
        f"--val-fraction {fraction}: from 0 to less than 1": 0 <= fraction < 1,
        f"--shard-tokens {tokens}: at least 1": tokens >= 1,
        f"--processes {processes}: at least 1": processes >= 1,
    }
    problems = [problem for problem, kept in bounds.items() if not kept]
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
            most=most,
        )
    except BrokenProcessPool as error:
        raise TransientError(str(error)) from error
    for split in SPLITS:
        shards = dataset.of(split)
        documents = sum(shard.documents for shard in shards)
        say(f"{split}: {tokens_in(shards):,} tokens; documents: {documents:,}; shards: {len(shards)}")
    if fraction and not dataset.of("validation"):
        say(
            f"note: there is nothing to evaluate on: no document's hash falls into --val-fraction {fraction:g}: raise "
            r"it, or cut the text into documents with --separator, as in '\n\n'"
        )
    say(f"train on it: data=shards data.path={given.out}")
    return FINISHED
