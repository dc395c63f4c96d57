"""A bucket that does not exist is a mistake of whoever named it; nothing creates it."""

import fsspec
import pytest

from mingpt.commands import snapshots
from mingpt.errors import USER_ERROR, UserError
from mingpt.preflight.places import write
from mingpt.snapshot import hot
from mingpt.snapshot.store import Store
from run_kit import train
from snapshot_kit import save
from store_kit import Stores, nightly

pytestmark = pytest.mark.slow
MISSING = "there is no such file or bucket"


@pytest.mark.parametrize("kind", ["moto", nightly("azurite"), nightly("google")])
def test_nobody_creates_a_bucket_and_all_end_with_64(
    kind: str, serve: Stores, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(kind)
    url = f"{server.scheme}://no-such-bucket/run"
    for act in (
        lambda: hot.run_id(url),
        lambda: Store(url).conditional_puts,
        lambda: write([("run.dir", url)], "me", f"{url}/snapshots"),  # preflight's
    ):
        with pytest.raises(UserError, match=MISSING):
            act()
    save(Store(f"{server.url}/run/snapshots"), 1)
    for command in (["list"], ["verify"], ["digest"], ["show"], ["prune"], ["copy", f"{server.url}/run"]):
        assert snapshots.main([*command, url]) == USER_ERROR, command
    assert MISSING in capsys.readouterr().err
    here = tmp_path_factory.mktemp("here")
    done = train(here, "data=addition", "model=gpt-nano", f"run.dir={url}", "train.max_steps=2")
    assert (done.returncode, done.stderr.startswith(f"error: run.dir={url}: {MISSING}")) == (USER_ERROR, True)
    assert not fsspec.filesystem(server.scheme).exists("no-such-bucket")
