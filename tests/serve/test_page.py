"""The page in a real browser, where there is one: it streams a text, and fits a phone."""

import asyncio
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from mingpt.commands import generate
from mingpt.serve.app import app_of
from serve_kit import served_for, serving, trained

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The page lies in a frame of a phone's or a desktop's width. The browser tells what it shows once all is loaded, and
# the image is answered only when the text is complete.
FRAME = """<!doctype html><img src=/finished>
<iframe id=f style="width:%dpx;height:900px"
  src="/#prompt=ab&max_tokens=40&temperature=20&seed=3&go"></iframe><p id=o></p>
<script>
const timer = setInterval(async () => {
  const page = f.contentDocument, state = page && page.getElementById('state');
  if (!state || !(state.className || state.textContent.includes(' tokens in '))
    || page.getElementById('go').disabled) return;
  clearInterval(timer);
  const whole = page.documentElement, out = page.getElementById('out');
  o.textContent = JSON.stringify({state: state.textContent, text: out.textContent, nodes: out.childNodes.length,
    over: whole.scrollWidth - whole.clientWidth, title: page.title, key: page.getElementById('keyed').offsetHeight});
  await fetch('/told', {method: 'POST'});
}, 50);
</script>"""


def watched(app: Starlette, width: int) -> None:
    """Add the frame to the server."""
    told = asyncio.Event()

    async def tell(request: Request) -> Response:
        told.set()
        return Response()

    async def finished(request: Request) -> Response:
        await asyncio.wait_for(told.wait(), 60)
        return Response()

    async def frame(request: Request) -> Response:
        return HTMLResponse(FRAME % width)

    app.router.routes += [Route("/told", tell, methods=["POST"]), Route("/finished", finished), Route("/frame", frame)]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is on the PATH")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_streams_a_text_and_fits(width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run")
    options = ["--prompt", "ab", "--tokens", "40", "--temperature", "20", "--seed", "3"]
    assert generate.main([str(run), *options]) == 0
    expected = capsys.readouterr().out.removesuffix("\n")
    served = served_for(run)
    app = app_of(served)
    watched(app, width)
    with serving(served, app) as address:
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--timeout=60000")
        command = [str(BROWSER), *flags, f"--user-data-dir={tmp_path}/user", "--dump-dom", f"{address}/frame"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.search(r"<p id=\"o\">(.+?)</p>", done.stdout, re.S)
    assert found, done.stderr
    seen = json.loads(unescape(found[1]))
    assert seen["text"] == expected
    assert seen["nodes"] > 20  # it came in pieces
    assert seen["state"].startswith("40 tokens in ")
    assert (seen["title"], seen["over"], seen["key"]) == ("little", 0, 0)
