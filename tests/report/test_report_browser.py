"""The report in a real browser: nothing is requested, nothing complains, nothing is wider than the window."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mingpt.report.reading import Run
from tests.kits.browser_kit import Browser, browser
from tests.kits.report_kit import CONFIG, Made, three_attempts
from tests.kits.verb_kit import mingpt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(not shutil.which("chromium"), reason="needs Chromium: apt-get install chromium"),
]
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
EVIL = "</script><script>window.broken = 1</script><img src=http://x.invalid onerror='broken = 1'>"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of one run that is a stranger's, and of four, of which one is a fork."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("a1", "b2", "c3"):
        made = three_attempts(folder / name)
        made.metrics(3, [{"step": s, "tokens_seen": s * 512, "mfu": 0.4} for s in range(21, 31)])
        made.snapshot(20, run=name, config=CONFIG | {"seed": int(name[-1])})
    mingpt(f"fork {folder}/a1@20 {folder}/fork optimizer.lr=0.02 batch.micro_size=8 data.path=x")
    parent = Run(f"{folder}/fork").past.parent
    assert parent
    Made(folder / "fork").attempt(parent.attempt + 2, 20, 25, parent=parent.attempt + 1)
    stranger = three_attempts(folder / "stranger").attempt(4, 30, 33, parent=3, end=f"failed: {EVIL}", host=EVIL)
    stranger.metrics(4, [{"step": 31, "sample": EVIL}, {"step": 32, "skipped": {"spike": EVIL}}])
    stranger.snapshot(33, run=EVIL, config=CONFIG | {EVIL: EVIL})
    Made(folder / "first").attempt(1, 0, 1)
    Made(folder / "empty").claim(1, 0)
    made_of = {"stranger": ["stranger"], "four": ["a1", "b2", "c3", "fork"]}
    made_of |= {name: [name] for name in ("fork", "first", "empty")}
    for name, runs in made_of.items():
        mingpt(f"report --out {folder}/{name}.html", *(folder / run for run in runs))
    return {name: folder / f"{name}.html" for name in made_of}


def told(tab: Browser, *methods: str) -> list[Any]:
    return [event["params"] for event in tab.events if event.get("method") in methods]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (800, True), (390, False)])
@pytest.mark.parametrize(("name", "charts"), [("stranger", 4), ("four", 5), ("fork", 4), ("first", 4), ("empty", 0)])
def test_a_page_fits_requests_nothing_and_has_no_error(
    tab: Browser, pages: dict[str, Path], name: str, charts: int, width: int, dark: bool
) -> None:
    """Also that of a run that has hardly begun."""
    tab.open(pages[name], width, dark=dark)
    assert tab.evaluate("charts.length") == charts
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert told(tab, *COMPLAINTS) == []
    assert [request["request"]["url"] for request in told(tab, "Network.requestWillBeSent")] == [pages[name].as_uri()]
    assert tab.evaluate("typeof broken") == "undefined"
    ink = tab.evaluate("getComputedStyle(document.body).color")
    assert ink == ("rgb(228, 232, 236)" if dark else "rgb(31, 41, 51)")


def test_a_fork_without_its_parent_begins_with_its_own_steps(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["fork"], 1280)
    assert tab.evaluate("pointsOf(runs[0], CHARTS[0]).x") == [21, 22, 23, 24, 25]
    assert tab.evaluate("runs[0].hours.y.at(-1)") == 50 / 3600  # five steps of 10 s; its parent's are not known


def middle(tab: Browser, chart: int, across: float) -> tuple[float, float]:
    """A place in a chart, in the window."""
    box = tab.evaluate(f"JSON.parse(JSON.stringify(charts[{chart}].over.getBoundingClientRect()))")
    return box["left"] + across * box["width"], box["top"] + box["height"] / 2


AXIS = "charts.map(u => [u.scales.x.min, u.scales.x.max])"


def test_a_drag_zooms_all_charts_a_double_click_goes_back_and_the_cursor_reads_every_curve(
    tab: Browser, pages: dict[str, Path]
) -> None:
    tab.open(pages["stranger"], 1280)
    whole = tab.evaluate(AXIS)
    assert whole == [[0, 33]] * 4
    y = middle(tab, 0, 0)[1]
    for kind, across, buttons in (("mouseMoved", 0.5, 0), ("mousePressed", 0.5, 1), ("mouseMoved", 1.0, 1)):
        tab.mouse(kind, middle(tab, 0, across)[0] - 1, y, buttons=buttons, clickCount=1)
    tab.mouse("mouseReleased", middle(tab, 0, 1.0)[0] - 1, y, buttons=0, clickCount=1)
    zoomed = tab.evaluate(AXIS)
    assert all(16 < low < 17 and 32.5 < high <= 33 for low, high in zoomed)
    assert len({tuple(axis) for axis in zoomed}) == 1
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            tab.mouse(kind, middle(tab, 0, 0.5)[0], y, buttons=1, clickCount=count)
    assert tab.evaluate(AXIS) == whole
    values = tab.evaluate(
        "(charts[0].setCursor({ left: charts[0].over.clientWidth, top: 9 }), charts[0].legend.values)"
    )
    assert [value["_"] == "–" for value in values[-2:]] == [False, True]  # it was not evaluated so late
    tab.mouse("mouseMoved", middle(tab, 0, 0.5)[0], y)
    told = tab.evaluate("charts.map(u => u.legend.values.map(value => value._))")
    assert all("–" not in values for values in told), told
    assert "attempt 2: 4 × NVIDIA L4 n1" in tab.evaluate("document.querySelector('.told').textContent")


def test_axes_change_and_a_table_is_sorted(tab: Browser, pages: dict[str, Path]) -> None:
    tab.open(pages["four"], 1280)
    choose = "const s = document.querySelector('.tools select'); s.value = '{}'; s.onchange()"
    tab.evaluate(f"(() => {{ {choose.format('tokens')} }})()")
    assert tab.evaluate(AXIS)[0] == [0, 30 * 512]
    tab.evaluate(f"(() => {{ {choose.format('hours')} }})()")
    low, high = tab.evaluate(AXIS)[0]
    assert (low, round(high, 4)) == (0, round(30 / 360, 4))  # each step takes 10 s
    fork = "runs.find(run => run.fork)"  # its hours begin with those of its parent at that step
    assert tab.evaluate(f"axisOf({fork})(20)") == tab.evaluate(f"axisOf(runs[{fork}.fork.of])(20)") == 20 / 360
    tab.evaluate("document.querySelectorAll('.tools input[type=checkbox]').forEach(box => box.click())")
    assert tab.evaluate("charts[0].scales.x.distr + charts[0].scales.y.distr") == 6
    table = "document.querySelector('table.sortable')"
    names = tab.evaluate(f"[...{table}.rows[0].cells].map(cell => cell.textContent)")
    step = names.index("step")
    steps = f"[...{table}.rows].slice(1).map(row => row.cells[{step}].textContent)"
    for expected in (["25", "30", "30", "30"], ["30", "30", "30", "25"]):
        tab.evaluate(f"{table}.rows[0].cells[{step}].click()")
        assert tab.evaluate(steps) == expected
    assert told(tab, *COMPLAINTS) == []
