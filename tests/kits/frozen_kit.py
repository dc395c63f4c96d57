"""The runs of each version, one archive each in tests/frozen, made by its make.py: unpacked for a test, and packed."""

import tarfile
from pathlib import Path

from tests.kits.paths_kit import ROOT

FROZEN = ROOT / "tests/frozen"
ARCHIVES = sorted(FROZEN.glob("*.tar.xz"))
PARTS = ("digests.json", "data", "runs", "bucket", "hot")


def unpack(archive: Path, folder: Path) -> Path:
    """The folder, with all parts, as if they had just been written there."""

    def written_now(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        safe = tarfile.data_filter(member, path)
        return safe and safe.replace(mtime=None, deep=False)  # type: ignore[arg-type]

    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter=written_now)
    return folder


def pack(folder: Path, archive: Path) -> None:
    """Write the archive; the same files give the same one."""

    def anyones(member: tarfile.TarInfo) -> tarfile.TarInfo:
        mode = 0o755 if member.isdir() else 0o644
        return member.replace(mtime=0, uid=0, gid=0, uname="", gname="", mode=mode, deep=False)

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for part in PARTS:
            tar.add(folder / part, part, filter=anyones)  # a folder's files are sorted by name
