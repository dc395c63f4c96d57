"""What `mingpt report` reads from a run's directory, and what its page says."""

import json
import math
import re
import tracemalloc
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from uuid import uuid4

import fsspec
import numpy as np
import pytest

from mingpt.commands import report
from mingpt.observe.trace import RECORD
from mingpt.report.figures import groups, ticks
from mingpt.report.page import learning_rate, shares
from mingpt.report.reading import read_run
from mingpt.snapshot.find import run_dir_of
from report_kit import CONFIG, Made, loss_of, three_attempts
from snapshot_kit import files
from told import Told


def page_of(*arguments: object) -> str:
    """The page that the command writes for these arguments, which name no other place for it."""
    out = Path(str(arguments[0])).parent / "page.html"
    assert report.main([*map(str, arguments), "--out", str(out)]) == 0
    return out.read_text()


def shown(page: str) -> str:
    """What a reader sees, without the pictures."""
    text = re.sub(r"<style.*?</style>|<svg.*?</svg>", "", page, flags=re.S)
    rows = re.sub(r"</(tr|h\d|p|dd|title)>", "\n", text)
    lines = (" ".join(re.sub("<.*?>", " ", row).split()) for row in rows.split("\n"))
    return unescape("\n".join(filter(None, lines)))


# --- reading ---


def test_curves_are_those_of_the_steps_that_the_run_kept(tmp_path: Path) -> None:
    made = three_attempts(tmp_path)
    made.attempt(4, 30, 33, parent=3, losses={32: 7.0})  # overtaken by the next
    made.attempt(5, 31, 33, parent=4)
    run = read_run(str(tmp_path))
    assert run.loss.steps.tolist() == list(range(1, 34))
    assert run.loss.values.tolist() == [loss_of(s) for s in range(1, 34)]
    assert run.kept == {1: 10, 2: 20, 3: 30, 4: 31, 5: 33}
    val = run.curve("val_loss")
    assert (val.steps.tolist(), val.values.tolist()) == ([16, 20], [1.75, 1.5])
    no_end = "no end: still going on, or killed"
    assert [a.end for a in run.attempts] == ["killed", "stopped", "finished", "killed", no_end]
    made.claim(6, 20, parent=2, by="rewind")
    run = read_run(str(tmp_path))
    assert (run.last_step, run.kept[3], run.loss.steps[-1], run.attempts[-1].end) == (20, 20, 20, "rewind")


def test_an_account_lags_behind_so_steps_are_told_by_the_next_attempt_or_else_by_the_trace(tmp_path: Path) -> None:
    Made(tmp_path).attempt(1, 0, 12, booked=0).attempt(2, 10, 20, parent=1, booked=15)
    assert read_run(str(tmp_path)).kept == {1: 10, 2: 20}
    for lost in (*tmp_path.glob("trace/attempt-00001*"), tmp_path / "metrics/attempt-00001.jsonl"):
        lost.unlink()  # a bucket has them some seconds late, too
    assert read_run(str(tmp_path)).kept == {1: 10, 2: 20}


@pytest.mark.parametrize("url", ["runs/a", "runs/a/", "runs/a/snapshots", "runs/a/snapshots/step-000000100"])
def test_a_run_is_found_by_its_snapshots_and_by_one_of_them(url: str) -> None:
    assert run_dir_of(url) == "runs/a"
    assert (run_dir_of("snapshots"), run_dir_of("/snapshots"), run_dir_of(".")) == (".", "/", ".")


def test_groups_keep_every_extreme_and_leave_out_what_is_not_finite() -> None:
    y = np.random.default_rng(1).normal(size=10_007)
    y[[3, 5, 4000]] = math.nan, math.inf, 99.0
    good = y[np.isfinite(y)]
    x, mean, low, high = groups(np.arange(len(y), dtype=float), y, most=300)
    assert len(x) == len(mean) == 300
    assert (low.min(), high.max()) == (good.min(), 99.0)
    assert ((low <= mean) & (mean <= high)).all()


# --- the page ---


def test_the_page_of_a_run(tmp_path: Path, told: Told) -> None:
    three_attempts(tmp_path / "run").snapshot(30)
    (tmp_path / "run/config.yaml").write_text("optimizer:\n  lr: 0.01\n")
    page = page_of(tmp_path / "run")
    told(shown(page), tmp_path)
    assert page == page_of(tmp_path / "run")
    run = read_run(str(tmp_path / "run"))
    assert run.ledger
    assert sum(spent for _, spent in shares(run)) == pytest.approx(sum(run.ledger.seconds.values()))


def test_the_learning_rate_is_that_of_every_step(tmp_path: Path) -> None:
    """So a warm-up is seen that was over before the first line of the log."""
    schedule = {"kind": "linear", "warmup_steps": 4, "decay_steps": 30, "min_ratio": 0.0}
    made = three_attempts(tmp_path)
    made.snapshot(30, config=CONFIG | {"schedule": schedule})
    curve = learning_rate(read_run(str(tmp_path)))
    assert curve.steps.tolist() == list(range(1, 31))
    assert curve.values[:6] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01, 0.01 * 25 / 26])
    made.snapshot(31, config=CONFIG | {"optimizer": {"lr": "much"}})
    assert set(learning_rate(read_run(str(tmp_path))).values) == {0.01}  # as the metrics have it


def test_an_axis_has_a_few_round_numbers() -> None:
    assert ticks(0.0131, 0.0152) == [0.0135, 0.014, 0.0145, 0.015]
    assert ticks(-3e29, 1e30) == [0, 5e29, 1e30]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[math.nan], [math.inf, -math.inf], [1e308, 2.0, math.nan], [1e308, -1e308] * 200])
def test_numbers_that_are_not_finite_survive(values: list[float], tmp_path: Path) -> None:
    made = Made(tmp_path / "run").attempt(1, 0, len(values), losses=dict(enumerate(values, 1)))
    made.metrics(1, [{"step": 1, "val_loss": None, "lr": None, "grad_norm": 10**400, "tokens_per_second": "x"}])
    read = read_run(str(tmp_path / "run")).loss.values
    assert np.array_equal(read, np.array(values), equal_nan=True)
    page_of(tmp_path / "run")


def test_runs_of_which_little_is_known(tmp_path: Path, told: Told) -> None:
    Made(tmp_path / "claimed").claim(1, 0)  # it has not made a step
    Made(tmp_path / "one").attempt(1, 0, 1)
    Made(tmp_path / "metrics").metrics(1, [Made.row(10, loss=2.0)]).metrics(2, [Made.row(20, loss=1.0)])
    bare = Made(tmp_path / "bare")
    bare.history.append({"attempt": 1, "world_size": 3, "at": "2026-01-01T00:00:00+00:00"})
    bare.snapshot(5)
    runs = [tmp_path / name for name in ("claimed", "one", "metrics", "bare")]
    told("\n\n".join(shown(page_of(run)) for run in runs), tmp_path)
    for run in ("a", "b"):
        three_attempts(tmp_path / run).snapshot(30, run=run)
    assert page_of(tmp_path / "a", tmp_path / "b").count("<polyline") == 4  # two losses of each
    page_of(*runs)


def test_a_million_steps_need_little_memory_and_make_a_small_page(tmp_path: Path) -> None:
    Made(tmp_path / "run").attempt(1, 0, 10)
    trace = np.zeros(1_000_000, RECORD)
    trace["step"] = np.arange(1, len(trace) + 1)
    trace["loss"] = np.random.default_rng(1).normal(3, 1, len(trace))
    trace["loss"][::1000] = math.nan
    trace.tofile(tmp_path / "run/trace/attempt-00001-000000001.bin")
    tracemalloc.start()
    page = page_of(tmp_path / "run")
    assert tracemalloc.get_traced_memory()[1] < 400e6
    tracemalloc.stop()
    assert read_run(str(tmp_path / "run")).last_step == 1_000_000
    assert len(page) < 400_000


# --- safety ---


TAGS = {"script", "iframe", "object", "embed", "link", "base", "form", "a", "image", "foreignobject"}


class Safe(HTMLParser):
    """No script, and nothing that a browser would load or run: a whole list, since a page of ours has nothing else."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in TAGS
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("srcset", "action", "background")
            if name in ("src", "href", "xlink:href"):
                assert (value or "#").startswith(("#", "data:image/png;base64,")), attrs


def check_safe(page: str) -> None:
    Safe().feed(page)
    assert not re.findall(r"url\((?!#)|@import|https?:", page)


EVIL = [
    '<script>alert(1)</script>"><img src=x onerror=alert(1)>--><svg onload=alert(1)>',
    "]]><iframe></title></style></pre></table><base href=//x>$\\frac{",
    "\x1b[2J\u202eurl(//x)&lt;b&gt;" + "漢" * 500,
]


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_in_a_hostile_run_becomes_part_of_the_page(evil: str, tmp_path: Path) -> None:
    made = Made(tmp_path / "run").attempt(1, 0, 3, end=f"failed: {evil}", host=evil, device=evil)
    for entry in made.history:
        entry["at"] = evil
    changed = {"attempt": 2, "from_step": evil, "numerics": {evil: evil}, "changes": {evil: [evil, evil]}}
    made.history.append(changed)
    made.history.append({"attempt": [evil], "world_size": {evil: evil}, "numerics": evil, "changes": evil})
    made.snapshot(3, run=evil, config={evil: {evil: evil}, "batch": evil}, fingerprint={evil: evil, "reduce": [evil]})
    made.metrics(1, [{"step": 2, "loss": evil, "lr": [evil], "val_loss": {evil: 1}, "skipped": evil}])
    made.metrics(1, [{"step": 3, "skipped": {"microbatches": evil, "samples": {evil: evil}}}, {"step": 1 << 80}])
    made.metrics(1, [{"step": 2, "attempt": [evil]}, {"step": 3, f"val_loss/{evil}": 1.5, "val_loss/": evil}])
    account = json.loads((tmp_path / "run/ledger/attempt-00001.json").read_text())
    account["seconds"][evil] = 5.0
    (tmp_path / "run/ledger/attempt-00001.json").write_text(json.dumps(account))
    (tmp_path / "run/config.yaml").write_text(f"a: {evil}\n</pre>{evil}")
    page = page_of(tmp_path / "run")
    check_safe(page.replace("url(//x)", ""))
    assert len(page) < 400_000
    check_safe(page_of(tmp_path / "run", tmp_path / "run").replace("url(//x)", ""))


def test_the_page_loads_nothing_and_shows_no_secret(tmp_path: Path) -> None:
    made = three_attempts(tmp_path / "run")
    made.snapshot(30, config=CONFIG | {"data": {"path": "https://user:secret99@host/x?sig=secret99"}})
    (tmp_path / "run/config.yaml").write_text("data:\n  path: https://user:secret99@host/x\n")
    page = page_of(tmp_path / "run")
    check_safe(page.replace("https://***@host/x", ""))
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\"" in page
    assert "secret99" not in page


# --- the command ---


def test_the_page_is_written_into_a_local_run_or_here_and_the_run_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_attempts(tmp_path / "a").snapshot(30)
    monkeypatch.chdir(tmp_path)
    before = {name: Path("a", name).read_bytes() for name in files(tmp_path / "a")}
    assert report.main(["a"]) == 0
    page = Path("a/report.html").read_text()
    assert {name: Path("a", name).read_bytes() for name in files(tmp_path / "a")} == before | {
        "report.html": page.encode()
    }
    stored = f"memory://{uuid4().hex}/a"
    fsspec.filesystem("memory").put("a", stored, recursive=True)
    assert report.main([stored]) == 0
    assert Path("report.html").read_text().replace(stored, "a") == page


@pytest.mark.parametrize("arguments", ["nowhere", ".", "run " * 11, "run --out run/metrics", "linked"])
def test_problems_of_the_user_end_with_64(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    for name in ("run", "linked"):
        three_attempts(tmp_path / name)
    (tmp_path / "linked/config.yaml").symlink_to(tmp_path / "secret")
    monkeypatch.chdir(tmp_path)
    assert report.main(arguments.split()) == 64
    told(capsys.readouterr().err, tmp_path)
