"""`python docs/report_pictures.py RUN`: pictures of the report's page, down to its charts, by Chromium.

RUN: the run of eventful_run.py, by a path that may be seen. Writes report-light.png, report-dark.png, report-phone.png.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "kits"))

from browser_kit import browser  # noqa: E402 (that folder is no package)

PICTURES = {"light": (1100, False), "dark": (1100, True), "phone": (390, False)}  # width in CSS pixels, dark


def main(run: str) -> None:
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder, "profile")) as tab:
        page = Path(folder, "report.html")
        subprocess.run([sys.executable, "-m", "mingpt", "report", run, "--out", str(page)], check=True)
        for name, (width, dark) in PICTURES.items():
            tab.open(page, width, dark=dark)
            # As under a mouse: with the values of all curves at one place.
            tab.evaluate("charts.forEach(u => u.setCursor({ left: u.over.clientWidth * 0.8, top: 60 }))")
            bottom = tab.evaluate("document.getElementById('charts').getBoundingClientRect().bottom + 16")
            tab.screenshot(HERE / f"report-{name}.png", height=bottom)


if __name__ == "__main__":
    main(sys.argv[1])
