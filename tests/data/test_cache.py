"""mingpt.data.cache and shardcache: what is complete is read from a disk that can only be read."""

import sys
from pathlib import Path

import pytest

from mingpt.config.datasets import ShardsData, TextData
from mingpt.data.shards import open_shards
from mingpt.data.source import Source
from mingpt.data.text import open_text
from tests.kits.paths_kit import ran
from tests.kits.prepare_kit import prepared, some_texts, write_jsonl
from tests.kits.web_kit import served


def text(folder: Path) -> Source:
    if not (folder / "text.txt").exists():
        (folder / "text.txt").write_text("the king and the queen\n" * 10)
    given = {"path": str(folder / "text.txt"), "cache_dir": str(folder / "cache"), "cache_timeout_seconds": 0.05}
    return open_text(TextData.model_validate(given), 8)


def shards(folder: Path, url: str) -> Source:
    given = {"path": url, "cache_dir": str(folder / "cache"), "cache_timeout_seconds": 0.05}
    return open_shards(ShardsData.model_validate(given), 8, 1)


READ = """
import sys
from pathlib import Path
from test_cache import shards, text
print(text(Path("."), ).train[[0]][0].sum().item(), shards(Path("."), sys.argv[1]).train[[0]][0].sum().item())
"""


@pytest.mark.slow
def test_a_complete_cache_is_read_from_a_read_only_disk(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    prepared([write_jsonl(tmp_path / "a.jsonl", some_texts(20))], tmp_path / "remote/set", val_fraction=0.1)
    with served(tmp_path / "remote") as url:
        read = [sys.executable, "-c", READ, f"{url}/set"]
        environment = {"PYTHONPATH": ":".join([*sys.path, str(Path(__file__).parent)])}
        written = ran(read, cwd=tmp_path, env=environment)
        assert written.returncode == 0, written.stderr
        script = 'mount --bind cache cache && mount -o remount,ro,bind cache && exec "$@"'
        again = ran(["unshare", "-m", "bash", "-c", script, "bash", *read], cwd=tmp_path, env=environment)
    assert again.returncode == 0, again.stderr
    assert again.stdout == written.stdout
