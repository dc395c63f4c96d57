"""Large texts and hostile data sets: what is large, or unpacks to much, is read in bounded memory, or refused."""

import gzip
import json
import sys
from hashlib import sha256
from pathlib import Path

import pyarrow
from pyarrow import parquet

from tests.kits.paths_kit import ran

# In a process of its own: what the code takes beyond its imports.
MEASURE = """
import json, sys
from mingpt.config.datasets import TextData
from mingpt.data import text
from mingpt.data.opening import open_data
from mingpt.errors import UserError
from mingpt.prepare.documents import Options, blocks
from mingpt.prepare.sources import find_files
import pyarrow.parquet

def peak():
    # Not ru_maxrss, which begins with that of the process that started this one (a vfork).
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    return int(line.split()[1]) // 1024

text.BLOCK, text.LARGE = 1 << 18, 1 << 22
path, read = sys.argv[1], 0
before = peak()
try:
    if path.endswith(".txt"):
        read = open_data(TextData(path=path, cache_dir=path + ".cache"), 8, 1).sha256
    else:
        for block in blocks(find_files([path], None, {}), Options()):
            read += sum(len(piece.text) for piece in block.pieces)
except UserError as mistake:
    print(mistake)
print(json.dumps([read, peak() - before]))
"""


def measured(path: Path) -> tuple[list[str], int | str, int]:
    """What was said, how many characters were read (or their hash), MiB that it took."""
    done = ran([sys.executable, "-c", MEASURE, str(path)], check=True)
    *said, last = done.stdout.splitlines()
    read, mib = json.loads(last)
    return said, read, mib


def test_a_long_string_of_each_of_many_rows_is_unpacked_a_few_at_a_time(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["king " * 200_000] * 250})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", dictionary_pagesize_limit=1 << 30)
    assert (tmp_path / "a.parquet").stat().st_size < 2000
    said, read, mib = measured(tmp_path / "a.parquet")
    assert (said, read) == ([], 250_000_000)
    assert mib < 180


def test_a_line_of_json_that_never_ends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "') + gzip.compress(b"a" * (1 << 20)) * 300)
    [mistake], _, mib = measured(tmp_path / "a.jsonl.gz")
    assert "a.jsonl.gz: cannot be read as jsonl (line 1 is longer than 67108864 bytes): correct it" in mistake
    assert mib < 200


def test_a_large_text_takes_little_and_is_announced(tmp_path: Path) -> None:
    content = "der Bär, größer – 漢字 🙂\n".encode() * 200_000
    (path := tmp_path / "source.txt").write_bytes(content)
    [first], read, mib = measured(path)
    assert f"data.path={path}" in first
    assert read == sha256(content).hexdigest()
    assert mib < 12  # read at once, this text of 7 MiB takes 47
