"""Hostile data sets: what a few bytes can be unpacked to is read in bounded memory, or refused."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from tests.kits.paths_kit import ran

# In a process of its own: what the code takes beyond its imports.
MEASURE = """
import json, sys
from mingpt.prepare.documents import Options, blocks
from mingpt.prepare.sources import find_files
from mingpt.errors import UserError
import pyarrow.parquet

def peak():
    # Not ru_maxrss, which begins with that of the process that started this one (a vfork).
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    return int(line.split()[1]) // 1024

before, read, mistake = peak(), 0, ""
try:
    for block in blocks(find_files([sys.argv[1]], None, {}), Options()):
        read += sum(len(piece.text) for piece in block.pieces)
except UserError as error:
    mistake = str(error)
print(json.dumps([read, mistake, peak() - before]))
"""


def measured(path: Path) -> tuple[int, str, int]:
    """Characters read, the mistake that was told, MiB that it took."""
    done = ran([sys.executable, "-c", MEASURE, str(path)], check=True)
    read, mistake, mib = json.loads(done.stdout)
    return read, mistake, mib


def test_a_long_string_of_each_of_many_rows_is_unpacked_a_few_at_a_time(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": ["king " * 200_000] * 250})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", dictionary_pagesize_limit=1 << 30)
    assert (tmp_path / "a.parquet").stat().st_size < 2000
    read, mistake, mib = measured(tmp_path / "a.parquet")
    assert (read, mistake) == (250_000_000, "")
    assert mib < 180


def test_a_line_of_json_that_never_ends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "') + gzip.compress(b"a" * (1 << 20)) * 300)
    _, mistake, mib = measured(tmp_path / "a.jsonl.gz")
    assert "a.jsonl.gz: cannot be read as jsonl (line 1 is longer than 67108864 bytes): correct it" in mistake
    assert mib < 200
