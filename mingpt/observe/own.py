"""Observers of the user's own: what `observers` names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mingpt.cli.console import Say
from mingpt.config import plugin
from mingpt.config.section import Own
from mingpt.observe.background import Background
from mingpt.observe.events import END_SECONDS, AttemptEnded, AttemptFailed, Event


class OwnObserver:
    """Makes one, and hands events to it, in a thread: it delays nothing but the end of an attempt, by END_SECONDS.

    It gets the next event also if it has failed at one. supplied: see plugin.SUPPLIED.
    """

    def __init__(self, settings: Own, say: Say, **supplied: Any) -> None:
        self.settings, self.supplied = settings, supplied
        self._background = Background[Event](f"observers: {settings.target}", self._opened, say)

    @contextmanager
    def _opened(self) -> Iterator[Callable[[Event], None]]:
        observer = plugin.call("observers", self.settings, **self.supplied)

        def on(event: Event) -> None:
            try:
                observer.on(event)
            except BaseException as error:  # SystemExit, too: it would end the thread without a word
                raise RuntimeError(f"{type(event).__name__}: {plugin.describe(error, type(observer))}") from error

        yield on

    def on(self, event: Event) -> None:
        self._background.put(event)
        if isinstance(event, (AttemptEnded, AttemptFailed)):
            self._background.close(END_SECONDS)
