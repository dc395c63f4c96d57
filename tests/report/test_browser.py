"""The page in a real browser, where there is one."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from mingpt.commands import report
from report_kit import three_attempts

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The page lies in a frame of a phone's or a desktop's width; what is measured there comes out as JSON.
MEASURE = """<!doctype html>
<iframe id=f style="width:%dpx;height:900px;border:0" srcdoc="%s"></iframe><p id=o></p>
<script>onload = () => {
  const page = f.contentDocument, all = names => [...page.querySelectorAll(names)];
  const seen = () => all('svg').filter(s => s.clientWidth).map(s => s.getAttribute('aria-label'));
  const heights = all('svg text').map(t => t.getBoundingClientRect().height).filter(height => height);
  const color = (name, key) => getComputedStyle(page.querySelector(name))[key];
  const whole = page.documentElement;
  const found = {over: whole.scrollWidth - whole.clientWidth, before: seen(), smallest: Math.min(...heights),
    ink: color('svg text', 'fill'), body: color('body', 'color')};
  o.textContent = JSON.stringify(found);
};</script>"""


def measured(page: str, width: int, folder: Path) -> Any:
    (folder / "frame.html").write_text(MEASURE % (width, escape(page)))
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,1000",
        f"--user-data-dir={folder}/user",
    )
    command = [str(BROWSER), *options, f"--user-data-dir={folder}/user", "--dump-dom", f"file://{folder}/frame.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.search(r"<p id=\"o\">(.+?)</p>", done.stdout)
    assert found, done.stderr
    return json.loads(unescape(found[1]))


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is on the PATH")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_phone_and_a_desktop(width: int, tmp_path: Path) -> None:
    device = "NVIDIA H100 80GB HBM3 of a long name"
    made = three_attempts(tmp_path / "run").attempt(4, 30, 40, parent=3, device=device, host="node.domain." * 9)
    made.snapshot(40)
    assert report.main([str(tmp_path / "run")]) == 0
    found = measured((tmp_path / "run/report.html").read_text(), width, tmp_path)
    assert found["before"] == ["loss", "learning rate", "tokens/s"]
    assert found["over"] == 0  # nothing needs scrolling to the side
    assert found["smallest"] >= 10
    assert found["ink"] == found["body"] == "rgb(31, 41, 51)"
