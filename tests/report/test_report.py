"""What `mingpt report` reads from a run's directory, and what its page says."""

import json
import math
import os
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import numpy as np
import pytest

from mingpt.report import html
from mingpt.report.curves import groups
from mingpt.report.reading import Run
from mingpt.snapshot.attempts import Attempt, _started, this_process
from tests.kits.report_kit import CONFIG, Made, loss_of, three_attempts
from tests.kits.snapshot_kit import contents
from tests.kits.told import Told
from tests.kits.verb_kit import mingpt

PageOf = Callable[..., str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")  # of the terminal


@pytest.fixture
def page_of() -> PageOf:
    """The page of these runs."""

    def page_of(*runs: str) -> str:
        mingpt("report --out page.html", *runs)
        return Path("page.html").read_text()

    return page_of


def claim(run: str, attempt: int, **more: object) -> None:
    """What that attempt's claim says, too."""
    file = Path(run, f"attempts/{attempt:05d}.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


def drawn(page: str) -> list[dict[str, Any]]:
    """What the page's charts draw, by run."""
    [numbers] = re.findall('<script type="application/json" id="curves">(.*?)</script>', page, flags=re.S)
    return json.loads(numbers)


def shown(page: str) -> str:
    """What a reader sees without scripts."""
    text = re.sub(r"<style.*?</style>|<script.*?</script>|<!--.*?-->", "", page, flags=re.S)
    rows = re.sub(r"</(tr|h\d|p|dd|title)>", "\n", text)
    lines = (" ".join(re.sub("<.*?>", " ", row).split()) for row in rows.split("\n"))
    return unescape("\n".join(filter(None, lines)))


# --- reading ---


def test_curves_are_those_of_the_steps_that_the_run_kept_and_the_charts_draw_them(page_of: PageOf) -> None:
    made = three_attempts("run")
    made.attempt(4, 30, 33, parent=3, losses={32: 7.0})  # overtaken by the next
    made.attempt(5, 31, 33, parent=4)
    run = Run("run")
    assert run.loss.steps.tolist() == list(range(1, 34))
    assert run.loss.values.tolist() == [loss_of(s) for s in range(1, 34)]
    assert run.kept == {1: 10, 2: 20, 3: 30, 4: 31, 5: 33}
    assert run.attempts[-1].end == "running, or killed"  # its claim names no process
    made.claim(6, 20, parent=2, by="rewind").attempt(7, 20, 22, parent=6, end="failed: no disk")
    [drawing] = drawn(page_of("run"))
    steps, loss, norm = [float(s) for s in range(1, 23)], drawing["curves"]["loss"], drawing["curves"]["grad_norm"]
    assert (loss["x"], loss["y"]) == (steps, [float(f"{loss_of(int(s)):.6g}") for s in steps])
    assert (norm["x"], set(norm["y"])) == (steps, {0.5})
    assert drawing["curves"]["val_loss"] == {"x": [16.0, 20.0], "y": [1.75, 1.5]}
    assert drawing["curves"]["mfu"] == {"x": [], "y": []}
    assert [tuple(a[key] for key in ("number", "first", "last", "kind", "end")) for a in drawing["attempts"]] == [
        (1, 0, 10, "1 × cpu", "killed"),
        (2, 10, 20, "4 × NVIDIA L4", "stopped"),
        (3, 20, 20, "2 × cpu", "finished"),
        (4, 30, 30, "2 × cpu", "killed"),
        (5, 31, 31, "2 × cpu", "killed"),
        (6, 20, 20, "", "rewind"),
        (7, 20, 22, "2 × cpu", "failed: no disk"),
    ]


def test_an_account_lags_behind_so_steps_are_told_by_the_next_attempt_or_else_by_the_trace() -> None:
    made = Made("run").attempt(1, 0, 12, booked=0).attempt(2, 10, 20, parent=1, booked=15)
    assert Run("run").kept == {1: 10, 2: 20}
    for folder in ("trace", "metrics"):
        [lost] = made.folder.glob(f"{folder}/attempt-00001*")
        lost.unlink()  # a bucket has them some seconds late, too
    assert Run("run").kept == {1: 10, 2: 20}


def test_skipped_steps_and_rollbacks_are_marked(page_of: PageOf) -> None:
    skipped = [{"step": 4, "skipped": {"spike": True}}, {"step": 5, "skipped": {}}, {"step": 9, "skipped": {}}]
    made = Made("run").attempt(1, 0, 9, end="failed: three in a row").metrics(1, skipped)
    made.claim(2, 6, parent=1, by="rewind").attempt(3, 6, 8, parent=2, end="finished")
    claim("run", 2, dropped=[6, 9])
    [run] = drawn(page_of("run"))
    assert run["skipped"] == [[4, True], [5, False]]
    assert [attempt["dropped"] for attempt in run["attempts"]] == [None, [6, 9], None]


def test_the_learning_rate_is_that_of_every_step_and_as_it_was_logged(trained: Path) -> None:
    """The config gives it: a warm-up is visible that was over before the first step was logged."""
    run = Run(str(trained))
    rates, logged = run.lr, run.curve("lr")
    assert rates.steps.tolist() == list(range(1, 13))
    assert rates.values[logged.steps.astype(int) - 1].tolist() == logged.values.tolist() != []
    assert len(set(rates.values)) > 2


def test_a_learning_rate_that_the_config_does_not_tell_is_the_logged_one() -> None:
    for config in (
        {"schedule": {"_target_": "mine.rate"}},
        {"optimizer": {"lr": "x"}},
        {"batch": {"global_size": "x"}},
    ):
        made = Made(f"{len(json.dumps(config))}").attempt(1, 0, 3)
        made.snapshot(3, config=CONFIG | config)
        assert Run(str(made.folder)).lr.values.tolist() == [0.01] * 3, config


@pytest.mark.parametrize(("count", "steps"), [(20, 1.0), (8000, 2.0)])
def test_the_points_of_a_run_of_a_million_steps_stay_apart_and_are_no_more_than_a_screen_has(
    page_of: PageOf, count: int, steps: float
) -> None:
    first, tokens = 1_234_561, [1_234_561_512 + 512 * i for i in range(20)]
    made = Made("run").attempt(1, first - 1, first - 1 + count, losses={first: 9.0})
    made.metrics(1, [{"step": first + i, "tokens_seen": seen} for i, seen in enumerate(tokens)])
    made.snapshot(first - 1 + count, config=CONFIG)
    [run] = drawn(page_of("run"))
    loss, rates = run["curves"]["loss"], run["curves"]["lr"]["x"]
    assert loss["x"] == [first + (steps - 1) / 2 + steps * i for i in range(int(count / steps))]
    assert loss.get("high", loss["y"])[0] == 9.0
    assert run["curves"]["tokens_seen"]["y"] == tokens
    assert (len(rates), rates[0], rates[-1]) == (count / steps, first, first - 1 + count)


def test_groups_keep_every_extreme_and_leave_out_what_is_not_finite() -> None:
    y = np.random.default_rng(1).normal(size=10_007)
    y[[3, 4000]] = math.nan, 99.0
    x, _, low, high = groups(np.arange(len(y), dtype=float), y, most=300)
    assert len(x) == 300
    assert (low.min(), high.max()) == (np.nanmin(y), 99.0)


# --- a folder of runs ---


def table_of(folder: str) -> dict[str, dict[str, str]]:
    """What `mingpt report FOLDER` prints, by run and column; columns are two blanks apart."""
    lines = [re.split(r" {2,}", line) for line in mingpt("report", folder).splitlines() if "  " in line]
    return {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[1:]}


def in_folder(name: str, **measured: float) -> Made:
    """A run of three attempts in a folder, with a config and a validation loss."""
    made = three_attempts(f"runs/{name}")
    Path(f"runs/{name}/config.yaml").write_text(f"seed: {name[-1]}\nmodel: {{n_layer: 2}}\n")
    return made.metrics(3, [{"step": 25, "val_loss": 1.25, **measured}])


def test_the_table_of_a_folder_follows_the_line_that_a_run_is_on() -> None:
    """After a rewind nothing in it is of the steps that were given up."""
    in_folder("a1")
    in_folder("b2").claim(4, 20, parent=2, by="rewind")
    figures = [[row[key] for key in ("state", "step", "loss", "val_loss")] for row in table_of("runs").values()]
    assert figures == [
        ["finished", "30", f"{loss_of(30):.6g}", "1.25"],
        ["rewind", "20", f"{loss_of(20):.6g}", "1.5"],
    ]


def test_an_attempt_without_an_end_is_killed_if_its_process_is_gone(page_of: PageOf) -> None:
    """Also before its first step; of a process on another machine nobody knows."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    process = this_process() | {"host": "n7", "launcher": "another"}
    killed, alive = ({"pid": pid, "started": _started(pid) or "1"} for pid in (gone.pid, os.getppid()))
    for name, owner in (("a1", killed), ("b2", alive)):
        in_folder(name).attempt(4, 30, 33, parent=3)
        claim(f"runs/{name}", 4, process=process | owner)
    for name, machine in (("c3", {}), ("d4", {"machine": "another"})):
        Attempt.claim(f"runs/{name}", 0, None)
        claim(f"runs/{name}", 1, process=process | killed | machine, at="2026-01-05T10:30:00+00:00")
    assert [(row["run"], row["state"], row["date (UTC)"][:7]) for row in table_of("runs").values()] == [
        ("c3", "killed", "2026-01"),
        ("d4", "running, or killed", "2026-01"),
        ("a1", "killed", "2023-11"),
        ("b2", "running", "2023-11"),
    ]
    assert "none, from 0 – n7 2026-01-05 10:30:00 – killed" in shown(page_of("runs/c3"))
    assert "from 0, killed" in mingpt("log runs/c3")


@pytest.mark.parametrize("same", [True, False])
def test_runs_that_were_validated_on_different_parts_are_not_ranked_without_a_word(page_of: PageOf, same: bool) -> None:
    in_folder("a1", val_tokens=1000.0, val_share=0.25)
    in_folder("b2", val_tokens=1000.0 if same else 4000.0, val_share=0.25 if same else 1.0)
    found = table_of("runs")
    assert [found[name]["val_share"] for name in ("a1", "b2")] == ["0.25", "0.25" if same else "1"]
    assert ("WARNING" in mingpt("report runs")) != same
    assert ("can't be compared" in shown(page_of("runs/a1", "runs/b2"))) != same
    assert "1,000 tokens, 25.0%" in shown(page_of("runs/a1"))


def test_a_folder_of_runs_and_a_file_give_the_table_and_the_page_of_them_all() -> None:
    for name in ("a1", "b2", "c3"):
        in_folder(name)
    out = mingpt("report runs --out all.html")
    assert out.splitlines()[-1] == "report: all.html"
    page = Path("all.html").read_text()
    assert "3 runs" in shown(page)
    assert "run state date (UTC) model step loss val_loss val_share seed" in shown(page)
    assert [len(run["curves"]["loss"]["x"]) for run in drawn(page)] == [30] * 3


def test_runs_are_compared_by_the_keys_that_somebody_has_set_and_that_all_of_them_have() -> None:
    """Not by what another kind of model lacks, nor by what follows another key."""
    configs = (
        "seed: 1\nmodel: {kind: gpt2, n_layer: 2}\nbatch: {global_size: 8}\noptimizer: {reference_batch: 8}\nown: 1\n",
        "seed: 1\nmodel: {kind: modern, n_layer: 2, kv_heads: 1}\nbatch: {global_size: 16}\n"
        "optimizer: {reference_batch: 16}\nown: 2\n",
    )
    for name, config in zip(("a1", "b2"), configs, strict=True):
        in_folder(name)
        Path(f"runs/{name}/config.yaml").write_text(config)
    assert [*table_of("runs")["a1"]][8:] == ["model.kind", "batch.global_size", "own"]


def test_settings_that_do_not_fit_into_a_line_stand_below_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("n_layer", "n_head", "n_embd", "dropout", "bias", "block_size")
    for name in ("a1", "a2"):
        in_folder(name)
        model = json.dumps({key: f"{key} of {name}" for key in keys})
        Path(f"runs/{name}/config.yaml").write_text(f"seed: 3\nmodel: {model}\n")
    monkeypatch.setenv("COLUMNS", "80")
    blocks = [block.splitlines() for block in mingpt("report runs").split("\n\n")]
    assert len(blocks) > 2
    assert all([line.split()[0] for line in block[:3]] == ["run", "a1", "a2"] for block in blocks)
    titles = [title for block in blocks[1:] for title in block[0].split()[1:]]
    assert titles == [f"model.{key}" for key in keys]
    assert max(len(line) for block in blocks[1:] for line in block) <= 80
    monkeypatch.setenv("COLUMNS", "300")
    assert "\n\n" not in mingpt("report runs")


def test_a_fork_is_drawn_from_where_it_leaves(page_of: PageOf) -> None:
    three_attempts("runs/base").snapshot(20)
    mingpt("fork runs/base@20 runs/fork optimizer.lr=0.02 batch.micro_size=8 data.path=x")
    parent = Run("runs/fork").past.parent
    assert parent
    Made("runs/fork").attempt(parent.attempt + 2, 20, 24, parent=parent.attempt + 1)
    base, fork = drawn(page_of("runs/base", "runs/fork"))
    assert (base["fork"], fork["fork"]) == (None, {"of": 0, "step": 20})
    assert (base["name"], fork["name"]) == ("base", "fork")  # as in the table: the folder's, and not run.name
    assert fork["curves"]["loss"]["x"] == [21.0, 22.0, 23.0, 24.0]
    [alone] = drawn(page_of("runs/fork"))
    assert alone["fork"] == {"of": None, "step": 20}  # its hours begin there, not at the parent's beginning


# --- the page ---


def test_the_page_of_a_run(tmp_path: Path, page_of: PageOf, told: Told) -> None:
    three_attempts(tmp_path / "run").snapshot(30)
    Path("run/config.yaml").write_text("optimizer:\n  lr: 0.01\n")
    page = page_of(f"{tmp_path}/run")
    told(shown(page), tmp_path)
    assert page == page_of(f"{tmp_path}/run")


@pytest.mark.parametrize(("disks", "alone"), [(({}, {"disk": "n3"}), "n3"), (({"disk": "n3"}, {}), "")])
def test_the_page_and_the_log_say_that_one_machine_has_the_run(
    page_of: PageOf, disks: tuple[dict[str, str], dict[str, str]], alone: str
) -> None:
    """As the newest attempt found it: a run may have been copied into a bucket meanwhile."""
    made = Made("run").attempt(1, 0, 1).attempt(2, 1, 2, parent=1)
    made.history = [entry | disk for entry, disk in zip(made.history, disks, strict=True)]
    made.snapshot(2)
    assert ("n3's alone" in shown(page_of("run"))) == bool(alone)
    assert ("; on n3's disk alone" in mingpt("log run")) == bool(alone)
    assert mingpt.json("log run")[0]["disk"] == alone


@pytest.mark.filterwarnings("error")
def test_numbers_that_are_not_finite_survive(page_of: PageOf) -> None:
    values = [math.nan, math.inf, 1e308, -1e308] * 100
    made = Made("run").attempt(1, 0, len(values), losses=dict(enumerate(values, 1)))
    made.metrics(1, [{"step": 1, "val_loss": None, "lr": None, "grad_norm": 10**400, "tokens_per_second": "x"}])
    assert np.array_equal(Run("run").loss.values, np.array(values), equal_nan=True)
    page_of("run")


# --- safety ---


TAGS = "html|head|meta|title|style|body|(no)?script|h[12]|p|div|section|d[ldt]|table|t[rhd]|details|summary|pre"
ATTRIBUTES = {"lang", "charset", "http-equiv", "content", "name", "class", "id", "type", "open"}
ROOM = Path(html.__file__).parent
OURS = [(ROOM / name).read_text() for name in html.SCRIPTS]


class Safe(HTMLParser):
    """Nothing but what a page of ours has, of which a browser loads nothing; and the scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.scripts = "", list[str]()
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        assert re.fullmatch(TAGS, tag)
        assert known.keys() <= ATTRIBUTES
        if "http-equiv" in known:
            self.policy = known["content"] or ""
        self.inside = tag == "script" and known.get("type") != "application/json"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts.append(data)
            self.inside = False


def check_safe(page: str) -> None:
    found = Safe()
    found.feed(page)
    assert found.scripts == OURS
    hashes = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in OURS)
    assert found.policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}"
    for script in OURS:
        page = page.replace(script, "")
    assert not re.findall(r"url\((?!#)|@import|https?:", page)
    drawn(page)  # is JSON still


def test_the_chart_library_is_the_released_one_with_its_licence() -> None:
    """uPlot 1.6.32, as its package on npm has it."""
    known = {
        "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    assert {p.name: sha256(p.read_bytes()).hexdigest() for p in (ROOM / "uplot").iterdir()} == known


EVIL = [
    '<script>alert(1)</script>"><img src=x onerror=alert(1)>--><svg onload=alert(1)>',
    "]]><iframe></title></style></pre></table><base href=//x>$\\frac{",
    "</script><script>alert(1)</script><!--<script>",
    "\x1b[2J\u202eurl(//x)&lt;b&gt;" + "漢" * 500,
]


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_in_a_hostile_run_becomes_part_of_the_page(evil: str, page_of: PageOf) -> None:
    made = Made("run").attempt(1, 0, 3, end=f"failed: {evil}", host=evil, device=evil, seconds={evil: 5.0, "step": 1.0})
    made.history[0]["at"] = evil
    changed = {"attempt": 2, "from_step": evil, "numerics": {evil: evil}, "changes": {evil: [evil, evil]}}
    nothing = {"attempt": [evil], "world_size": {evil: evil}, "numerics": evil, "changes": evil}
    made.history += [changed, nothing]
    made.snapshot(3, run=evil, config={evil: {evil: evil}, "batch": evil}, fingerprint={evil: evil, "reduce": [evil]})
    rows: list[dict[str, Any]] = [
        {"step": 2, "loss": evil, "lr": [evil], "val_loss": {evil: 1}, "skipped": evil}, {"step": 1 << 80},
        {"step": 3, "attempt": [evil], f"val_loss/{evil}": 1.5, "skipped": {"samples": {evil: evil}}},
    ]  # fmt: skip
    made.metrics(1, rows)
    Path("run/config.yaml").write_text(f"a: {evil}\n</pre>{evil}")
    page = page_of("run")
    assert len(page) < 400_000
    for text in (page, page_of("run", "run")):
        check_safe(text.replace("url(//x)", ""))


# --- the command ---


def test_the_page_is_written_into_a_local_run_or_here_and_the_run_stays_as_it_is() -> None:
    three_attempts("a").snapshot(30)
    before = contents(Path("a"))
    mingpt("report a")
    page = Path("a/report.html").read_text()
    assert contents(Path("a")) == before | {"report.html": page.encode()}
    stored = f"memory://{uuid4().hex}/a"
    fsspec.filesystem("memory").put("a", stored, recursive=True)
    mingpt(f"report {stored}")
    assert Path("report.html").read_text().replace(stored, "a") == page


@pytest.mark.parametrize("arguments", ["nowhere", "empty", "run --out run/metrics", "linked"])
def test_problems_of_the_user_end_with_64(arguments: str, tmp_path: Path, told: Told) -> None:
    Path("empty").mkdir()
    for name in ("run", "linked"):
        three_attempts(name)
    Path("linked/config.yaml").symlink_to("secret")
    told(mingpt.refused(f"report {arguments}"), tmp_path)
