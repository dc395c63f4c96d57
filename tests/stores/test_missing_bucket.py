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
from store_kit import KINDS, Stores

NOWHERE = "no-such-bucket"


def url_of(scheme: str, path: str) -> str:
    return f"{scheme}://{NOWHERE}/{path}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_no_write_creates_a_bucket(kind: str, serve: Stores) -> None:
    server = serve(kind)
    url = url_of(server.scheme, "run")
    with pytest.raises(UserError, match=rf"^run\.dir={url}: there is no such file or bucket: check the spelling"):
        hot.run_id(url)
    with pytest.raises(UserError, match=r"there is no such file or bucket"):
        _ = Store(url).conditional_puts
    with pytest.raises(UserError, match=rf"^run\.dir={url}: there is no such file or bucket"):
        write([("run.dir", url)], "me", f"{url}/snapshots")  # preflight's
    assert not fsspec.filesystem(server.scheme).exists(NOWHERE)


@pytest.mark.slow
def test_training_and_commands_end_with_64(
    serve: Stores, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket, tmp_path = serve("moto").url, tmp_path_factory.mktemp("here")
    done = train(tmp_path, "data=addition", "model=gpt-nano", f"run.dir={url_of('s3', 'run')}", "train.max_steps=2")
    assert done.returncode == USER_ERROR, done.stderr
    error = f"run.dir={url_of('s3', 'run')}: there is no such file or bucket: check the spelling"
    assert done.stderr.startswith(f"error: {error}")
    save(Store(f"{bucket}/run/snapshots"), 1)
    for command in (["list"], ["verify"], ["digest"], ["show"], ["prune"]):
        assert snapshots.main([*command, url_of("s3", "run")]) == USER_ERROR, command
    assert snapshots.main(["copy", f"{bucket}/run", url_of("s3", "run")]) == USER_ERROR
    assert "there is no such file or bucket" in capsys.readouterr().err
    assert not fsspec.filesystem("s3").exists(NOWHERE)
