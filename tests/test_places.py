"""What a store, a cache cleaner or a racing attempt can do to a start: each has its own clear end."""

import http.server
import threading
from pathlib import Path

import pytest

from mingpt.config import Data
from mingpt.data.text import open_text
from mingpt.errors import Mistake
from mingpt.metrics import MetricsLog, next_attempt
from mingpt.snapshot.store import Store
from mingpt.snapshots import find


def test_a_web_server_that_says_no_is_a_mistake_that_names_data_path(tmp_path: Path) -> None:
    class Forbidden(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forbidden)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/x.txt"
        with pytest.raises(Mistake, match=r"^data\.path="):
            open_text(Data(path=url, cache_dir=str(tmp_path)), 4)
    finally:
        server.shutdown()
        server.server_close()


def test_tokens_that_a_cache_cleaner_removed_are_built_anew(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("to be or not to be")
    config = Data(path=str(tmp_path / "x.txt"), cache_dir=str(tmp_path / "cache"), val_fraction=0.0)
    open_text(config, 4).train.path.unlink()
    assert open_text(config, 4).train.tokens.shape == (18,)


def test_the_loser_of_a_race_for_an_attempts_number_is_not_told_to_change_its_config(tmp_path: Path) -> None:
    first, second = next_attempt(str(tmp_path)), next_attempt(str(tmp_path))  # both look before either writes
    MetricsLog(str(tmp_path), first).close()
    with pytest.raises(RuntimeError, match=r"^another attempt has started at the same time: "):  # exit 70: try again
        MetricsLog(str(tmp_path), second)
    assert next_attempt(str(tmp_path)) == 2


def test_a_store_is_shown_without_its_secrets() -> None:
    assert Store("memory://user:password@runs/").url == "memory://***@runs"
    with pytest.raises(Mistake, match=r"^memory://\*\*\*@nowhere: no snapshot is there"):
        find("memory://user:password@nowhere")
