"""Alarms: posts JSON to the webhook health.notify when an attempt ends, or something is wrong."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from mingpt.cli.console import Say, complain
from mingpt.cli.redact import redacted
from mingpt.errors import USER_ERROR, Hang, RolledBack
from mingpt.observe.background import Background
from mingpt.observe.console import bits_line, ended_line
from mingpt.observe.events import AttemptEnded, AttemptFailed, BitsDiffer, Event, SnapshotLost
from mingpt.snapshot.attempts import utc_now
from mingpt.world.env import Env

LIMIT_SECONDS = 5.0  # for an answer, and at the end of an attempt


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What is posted is for the given address only."""

    def redirect_request(self, *_: Any) -> None:
        return None


@contextmanager
def _webhook(url: str) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that posts. Its errors do not contain the address, which is a secret."""
    opener = urllib.request.build_opener(_NoRedirect)

    def post(body: Mapping[str, Any]) -> None:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            opener.open(request, timeout=LIMIT_SECONDS).close()
        except urllib.error.HTTPError as error:
            raise ConnectionError(f"the webhook answered with status {error.code}") from None
        except Exception as error:
            reason = getattr(error, "reason", None)
            what = reason.strerror if isinstance(reason, OSError) else None
            raise ConnectionError(f"no answer from the webhook: {what or type(reason or error).__name__}") from None

    yield post


class Alarms:
    """Posts in a thread; a silent server delays nothing but the end of an attempt, by LIMIT_SECONDS at most."""

    def __init__(self, url: str, run: str, attempt: int | None, say: Say = complain) -> None:
        self.run, self.attempt = run, attempt
        self._background = Background[Mapping[str, Any]]("health.notify", partial(_webhook, url), say)

    def on(self, event: Event) -> None:
        match event:
            case AttemptEnded():
                self.post("finished" if event.finished else "stopped", event.step, ended_line(event))
            case AttemptFailed(error=RolledBack.__name__):
                self.post("rolled back", event.step, event.reason)
            case AttemptFailed(error=Hang.__name__):
                self.post("hang", event.step, event.reason)
            # Where there is a launcher, that one reports how the run has failed.
            case AttemptFailed() if event.code == USER_ERROR and not Env.read().ours:
                self.post("failed", event.step, event.reason)
            case SnapshotLost():
                times = f", {event.in_a_row} in a row" if event.in_a_row > 1 else ""
                self.post("snapshot lost", event.step, f"step {event.step} could not be stored{times}: {event.reason}")
            case BitsDiffer():
                self.post("different bits", event.step, bits_line(event))
        if isinstance(event, AttemptEnded | AttemptFailed):
            self.close()

    def post(self, event: str, step: int | None, text: str) -> None:
        what = {"event": event, "run": self.run, "attempt": self.attempt, "step": step, "text": redacted(text)}
        self._background.put({**what, "host": socket.gethostname(), "at": utc_now()})

    def close(self, seconds: float = LIMIT_SECONDS) -> None:
        self._background.close(seconds)


def notify(
    url: str | None, event: str, text: str, run: str, attempt: int | None = None, step: int | None = None
) -> None:
    """Post one alarm, if there is a webhook, for a process that is about to end. Raises nothing."""
    if url is not None:
        alarms = Alarms(url, run, attempt)
        alarms.post(event, step, text)
        alarms.close()
