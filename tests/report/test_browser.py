"""The page in a real browser, where there is one."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from report_kit import three_attempts
from verb_kit import mingpt

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
OPTIONS = "--headless --no-sandbox --disable-gpu --window-size=1400,1000 --dump-dom"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is on the PATH")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_phone_and_a_desktop(width: int, tmp_path: Path) -> None:
    long: dict[str, Any] = {"device": "NVIDIA H100 80GB HBM3 of a long name", "host": "node.domain." * 9}
    three_attempts(tmp_path / "run").attempt(4, 30, 40, parent=3, **long).snapshot(40)
    mingpt(f"report {tmp_path}/run")
    frame = tmp_path / "frame.html"
    frame.write_text(MEASURE % (width, escape((tmp_path / "run/report.html").read_text())))
    command = [str(BROWSER), *OPTIONS.split(), f"--user-data-dir={tmp_path}/user", f"file://{frame}"]
    page = subprocess.check_output(command, text=True, timeout=600)
    [measured] = re.findall(r"<p id=\"o\">(.+?)</p>", page)
    found = json.loads(unescape(measured))
    assert found["before"] == ["loss", "learning rate", "tokens/s"]
    assert found["over"] == 0  # nothing needs scrolling to the side
    assert found["smallest"] >= 10
    assert found["ink"] == found["body"] == "rgb(31, 41, 51)"
