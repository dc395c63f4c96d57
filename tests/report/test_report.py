"""What `mingpt report` reads from a run's directory, and what its page says."""

import json
import math
import re
import tracemalloc
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import fsspec
import numpy as np
import pytest

from mingpt.commands import report
from mingpt.observe.ledger import goodput_line
from mingpt.observe.trace import RECORD
from mingpt.report.figures import groups, ticks
from mingpt.report.page import facts, learning_rate, shares
from mingpt.report.reading import read_run
from mingpt.snapshot.find import run_dir_of
from report_kit import CONFIG, Made, loss_of, three_attempts
from snapshot_kit import files


def page_of(*arguments: object) -> str:
    """The page that the command writes for these arguments, which name no other place for it."""
    out = Path(str(arguments[0])).parent / "page.html"
    assert report.main([*map(str, arguments), "--out", str(out)]) == 0
    return out.read_text()


def cells(page: str, title: str) -> list[list[str]]:
    """The table under a heading, as the text of its cells."""
    table = page[page.index(f"<h2>{title}</h2>") :].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.S)
    return [[unescape(re.sub("<.*?>", "", c)) for c in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


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


def test_an_account_lags_behind_so_steps_are_told_by_the_next_attempt_or_else_by_the_trace(tmp_path: Path) -> None:
    Made(tmp_path).attempt(1, 0, 12, booked=0).attempt(2, 10, 20, parent=1, booked=15)
    assert read_run(str(tmp_path)).kept == {1: 10, 2: 20}
    for lost in (*tmp_path.glob("trace/attempt-00001*"), tmp_path / "metrics/attempt-00001.jsonl"):
        lost.unlink()  # a bucket has them some seconds late, too
    assert read_run(str(tmp_path)).kept == {1: 10, 2: 20}


def test_a_rewind_takes_steps_back_and_is_listed(tmp_path: Path) -> None:
    three_attempts(tmp_path).claim(4, 20, parent=2, by="rewind")
    run = read_run(str(tmp_path))
    assert (run.last_step, run.kept[3], run.loss.steps[-1]) == (20, 20, 20)
    assert [a.end for a in run.attempts] == ["killed", "stopped", "finished", "rewind"]


def test_the_newest_attempt_without_an_end_may_be_going_on(tmp_path: Path) -> None:
    Made(tmp_path).attempt(1, 0, 3).attempt(2, 2, 4, parent=1)
    assert [a.end for a in read_run(str(tmp_path)).attempts] == ["killed", "no end: still going on, or killed"]


def test_a_run_is_found_by_its_snapshots_and_by_one_of_them() -> None:
    assert run_dir_of("runs/a/") == run_dir_of("runs/a/snapshots") == "runs/a"
    assert run_dir_of("s3://b/a/snapshots/step-000000100") == "s3://b/a"
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


def test_the_page_of_a_run(tmp_path: Path) -> None:
    digest = three_attempts(tmp_path / "run").snapshot(30)
    (tmp_path / "run/config.yaml").write_text("optimizer:\n  lr: 0.01\n")
    run = read_run(str(tmp_path / "run"))
    assert facts(run) == {
        "parameters": "10", "step": "30", "tokens seen": f"{30 * 8 * 16:,}", "loss": f"{loss_of(30):.4f}",
        "best validation loss": "1.5000 (step 20)", "attempts": "3", "machine": "2 × cpu n3",
        "wall time": "5 h 36 min", "cost": "0.11",
    }  # fmt: skip
    page = page_of(tmp_path / "run")
    assert f"step 30 has the digest {digest}</p>" in page
    assert run.ledger
    assert f"<p>{goodput_line(run.ledger)}</p>" in page
    assert cells(page, "Attempts and snapshots")[1:] == [
        ["3", "21 to 30", "2 × cpu", "n3", "2027-01-15 13:33:20", "3 min 20 s", "finished"],
        ["2", "11 to 20", "4 × NVIDIA L4", "n1", "2027-01-15 10:46:40", "3 min 20 s", "stopped"],
        ["1", "1 to 10", "1 × cpu", "n1", "2027-01-15 08:00:00", "3 min 30 s", "killed"],
    ]
    ledger = {row[0]: row[1:] for row in cells(page, "Where the time went")[1:]}
    assert ledger.keys() == {"between attempts", "others, under 5% each"}
    assert sum(float(share.removesuffix(" %")) for _, share in ledger.values()) == pytest.approx(100, abs=0.1)
    assert sum(spent for _, spent in shares(run)) == pytest.approx(sum(run.ledger.seconds.values()))
    assert "<pre class='card'>optimizer:\n  lr: 0.01\n</pre>" in page
    assert page == page_of(tmp_path / "run")


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
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.0131, 0.0152) == [0.0135, 0.014, 0.0145, 0.015]
    assert ticks(-3e29, 1e30) == [0, 5e29, 1e30]


def test_the_losses_of_several_runs_are_in_one_picture(tmp_path: Path) -> None:
    for name in "ab":
        three_attempts(tmp_path / name).snapshot(30, run=name)
    page = page_of(tmp_path / "a", tmp_path / "b")
    assert page.count("<polyline") == 4  # a loss of each, and its validation loss


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[math.nan], [math.inf, -math.inf], [1e308, 2.0, math.nan], [1e308, -1e308] * 200])
def test_numbers_that_are_not_finite_survive(values: list[float], tmp_path: Path) -> None:
    made = Made(tmp_path / "run").attempt(1, 0, len(values), losses=dict(enumerate(values, 1)))
    made.metrics(1, [{"step": 1, "val_loss": None, "lr": None, "grad_norm": 10**400, "tokens_per_second": "x"}])
    read = read_run(str(tmp_path / "run")).loss.values
    assert np.array_equal(read, np.array(values), equal_nan=True)
    last = f"{values[-1]:.4f}" if abs(values[-1]) < 1e300 or not math.isfinite(values[-1]) else "-1.000e+308"
    assert f"<dt>loss</dt><dd>{last}</dd>" in page_of(tmp_path / "run")


def test_runs_of_which_little_is_known(tmp_path: Path) -> None:
    Made(tmp_path / "claimed").claim(1, 0)  # it has not made a step
    Made(tmp_path / "one").attempt(1, 0, 1)
    Made(tmp_path / "metrics").metrics(1, [Made.row(10, loss=2.0)]).metrics(2, [Made.row(20, loss=1.0)])
    bare = Made(tmp_path / "bare")
    bare.history.append({"attempt": 1, "world_size": 3, "at": "2026-01-01T00:00:00+00:00"})
    bare.snapshot(5)
    for name in ("claimed", "one", "metrics", "bare"):
        page_of(tmp_path / name)
    assert cells(page_of(tmp_path / "metrics"), "Attempts and snapshots")[1:] == [
        ["2", "20 to 20", "2", "–", "–", "–", "–"], ["1", "10 to 10", "2", "–", "–", "–", "–"],
    ]  # fmt: skip
    assert cells(page_of(tmp_path / "bare"), "Attempts and snapshots")[1][2:5] == ["3", "–", "2026-01-01 00:00:00"]
    page_of(*(tmp_path / name for name in ("claimed", "one", "metrics", "bare")))


def test_a_million_steps_need_little_memory_and_make_a_small_page(tmp_path: Path) -> None:
    made = Made(tmp_path / "run").attempt(1, 0, 10)
    trace = np.zeros(1_000_000, RECORD)
    trace["step"] = np.arange(1, len(trace) + 1)
    trace["loss"] = np.random.default_rng(1).normal(3, 1, len(trace))
    trace["loss"][::1000] = math.nan
    trace.tofile(tmp_path / "run/trace/attempt-00001-000000001.bin")
    bad = {"microbatches": [1], "samples": [2], "spike": False}
    made.metrics(
        1, [{"step": s, "loss": None, "grad_norm": None, "skipped": bad} for s in range(1000, 1_000_000, 1000)]
    )
    tracemalloc.start()
    page = page_of(tmp_path / "run")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read_run(str(tmp_path / "run")).last_step == 1_000_000
    assert len(page) < 400_000
    assert peak < 400e6


# --- safety ---


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def check_safe(page: str) -> None:
    """No script, and nothing that a browser would load or run: a whole list, since a page of ours has nothing else."""
    for tag, attributes in Tags(page).found:
        assert tag not in {"script", "iframe", "object", "embed", "link", "base", "form", "a", "image", "foreignobject"}
        assert not [name for name in attributes if name.startswith("on") or name in ("srcset", "action", "background")]
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,")), attributes
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
    made.metrics(1, [{"step": 2, "attempt": evil}, {"step": 2, "attempt": [evil]}])
    made.metrics(1, [{"step": 3, f"val_loss/{evil}": 1.5, "val_loss/": evil}])
    account = json.loads((tmp_path / "run/ledger/attempt-00001.json").read_text())
    account["seconds"][evil] = 5.0
    (tmp_path / "run/ledger/attempt-00001.json").write_text(json.dumps(account))
    (tmp_path / "run/config.yaml").write_text(f"a: {evil}\n</pre>{evil}")
    page = page_of(tmp_path / "run")
    check_safe(page.replace("url(//x)", ""))
    assert len(page) < 400_000
    check_safe(page_of(tmp_path / "run", tmp_path / "run").replace("url(//x)", ""))


def test_the_page_loads_nothing_and_forbids_it(tmp_path: Path) -> None:
    three_attempts(tmp_path / "run").snapshot(30)
    page = page_of(tmp_path / "run")
    check_safe(page)
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\"" in page


def test_secrets_of_a_config_are_not_shown(tmp_path: Path) -> None:
    made = three_attempts(tmp_path / "run")
    made.snapshot(30, config=CONFIG | {"data": {"path": "https://user:secret99@host/x?sig=secret99"}})
    assert "secret99" not in page_of(tmp_path / "run")
    (tmp_path / "run/config.yaml").write_text("data:\n  path: https://user:secret99@host/x\n")
    assert "secret99" not in page_of(tmp_path / "run")


def test_a_link_in_a_run_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three_attempts(tmp_path / "run")
    (tmp_path / "secret").write_text("s")
    (tmp_path / "run/config.yaml").symlink_to(tmp_path / "secret")
    assert report.main([str(tmp_path / "run")]) == 64
    assert "config.yaml is a link" in capsys.readouterr().err


# --- the command ---


def test_the_page_is_written_into_a_local_run_or_here_and_the_run_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    three_attempts(tmp_path / "a").snapshot(30)
    three_attempts(tmp_path / "b").snapshot(30)
    monkeypatch.chdir(tmp_path)
    before = {name: (tmp_path / "a" / name).read_bytes() for name in files(tmp_path / "a")}
    assert report.main(["a/snapshots"]) == 0
    assert capsys.readouterr().out == "report: a/report.html\n"
    assert {name: (tmp_path / "a" / name).read_bytes() for name in files(tmp_path / "a") if name in before} == before
    assert files(tmp_path / "a") == sorted([*before, "report.html"])
    assert report.main(["a", "b"]) == 0
    assert Path("report.html").read_text().startswith("<!doctype html>")


def test_a_run_in_a_store_is_reported_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_attempts(tmp_path / "run").snapshot(30)
    fs = fsspec.filesystem("memory")
    fs.put(str(tmp_path / "run"), "/reported", recursive=True)
    monkeypatch.chdir(tmp_path)
    try:
        assert report.main(["memory://reported"]) == 0
    finally:
        fs.rm("/reported", recursive=True)
    here, there = Path("report.html").read_text(), page_of(tmp_path / "run")
    assert here.replace("memory://reported", "RUN") == there.replace(str(tmp_path / "run"), "RUN")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere"], "error: nowhere: no run is there: check the spelling"),
        (["."], "error: .: no run is there"),
        (["run"] * 11, "error: 11 runs: a report shows at most 10"),
        (["run", "--out", "run/metrics"], "error: --out=run/metrics"),
    ],
)
def test_problems_of_the_user_end_with_64(
    arguments: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    three_attempts(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert report.main(arguments) == 64
    assert capsys.readouterr().err.startswith(problem)
