"""One thread generates, one request after the other; the others wait in a queue of limited length.

One at a time, because torch is not re-entrant and a text must not depend on what else is asked.
"""

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from mingpt.commands.generate import Text, grow
from mingpt.console import complain
from mingpt.data.vocabulary import TextVocabulary
from mingpt.errors import UserError
from mingpt.model.language import LanguageModel
from mingpt.serve.api import Refused

CLOSE_SECONDS = 10


@dataclass(frozen=True)
class Piece:
    """Some more text. finish: why it is the last piece, in OpenAI's words. tokens: generated so far."""

    text: str
    finish: str | None
    tokens: int


@dataclass(eq=False)
class Job:
    """A request. `arrived` gets its pieces, or the error that ends it, in the event loop of the server."""

    prompt: list[int]
    tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    stops: list[str]
    ends: int | None  # the token that ends a text
    loop: asyncio.AbstractEventLoop
    arrived: "asyncio.Queue[Piece | Exception]" = field(default_factory=asyncio.Queue)
    over: threading.Event = field(default_factory=threading.Event)  # nobody waits for more

    def put(self, item: Piece | Exception) -> None:
        """In the event loop."""
        if not self.over.is_set():
            self.arrived.put_nowait(item)
        if isinstance(item, Exception) or item.finish:
            self.over.set()


class Stops:
    """Passes on a text that grows, until one of `stops` is in it; a part that may become one waits."""

    def __init__(self, stops: list[str]) -> None:
        self.stops, self.held = stops, ""

    def pass_on(self, text: str, end: bool) -> tuple[str, bool]:
        """(what may be shown, whether a stop was found). end: nothing comes after this."""
        self.held += text
        if found := [at for stop in self.stops if (at := self.held.find(stop)) >= 0]:
            return self.held[: min(found)], True
        begun = [n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])]
        keep = 0 if end else max(begun, default=0)
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown, False


def pieces(model: LanguageModel, vocabulary: TextVocabulary, job: Job) -> Iterator[Piece]:
    """The text after the prompt. It ends with a stop, with the token `ends`, or after `tokens` tokens."""
    text, stops = Text(job.prompt, 0, [*job.prompt]), Stops(job.stops)
    text.new_text(vocabulary, end=True)  # the prompt's
    for _ in grow(model, [text], job):
        count = len(text.tokens) - len(job.prompt)
        ended = text.tokens[-1] == job.ends
        if ended:
            text.tokens.pop()
        last = ended or count == job.tokens
        shown, stopped = stops.pass_on(text.new_text(vocabulary, last), last)
        finish = "stop" if ended or stopped else "length" if last else None
        yield Piece(shown, finish, count)
        if finish:
            return


class Worker:
    """where: the snapshot's folder, for messages."""

    def __init__(self, model: LanguageModel, vocabulary: TextVocabulary, where: str, most_waiting: int) -> None:
        self.model, self.vocabulary, self.where, self.most_waiting = model, vocabulary, where, most_waiting
        self.draining = self.closed = False
        self.waiting, self._condition = deque[Job](), threading.Condition()
        self.running: Job | None = None
        self.thread = threading.Thread(target=self._work, name="generate", daemon=True)
        self.thread.start()

    def submit(self, job: Job) -> None:
        """Raises Refused if too many wait, or the server is about to end."""
        with self._condition:
            if self.draining:
                raise Refused(503, "the server is being stopped: try again later", "stopping")
            # One that is still generated does not wait, and neither does the one that is next.
            if len(self.waiting) >= self.most_waiting + (self.running is None):
                raise Refused(429, f"{self.most_waiting} requests are waiting already: try again later", "queue_full")
            self.waiting.append(job)
            self._condition.notify()

    def leave(self, job: Job) -> None:
        """Nobody waits for this job: its place in the queue is free, or its generation ends with the next token."""
        job.over.set()
        with self._condition:
            if job in self.waiting:
                self.waiting.remove(job)

    def close(self) -> None:
        """End the thread, with the token that it is at: Python's shutdown would abort the process inside of torch."""
        with self._condition:
            self.draining = self.closed = True
            if self.running:
                self.running.over.set()
            self._condition.notify()
        self.thread.join(CLOSE_SECONDS)

    def end_all(self, error: Refused) -> None:
        """In the event loop."""
        with self._condition:
            for job in [*self.waiting, *([self.running] if self.running else [])]:
                job.put(error)

    def _work(self) -> None:
        while True:
            with self._condition:
                self.running = None
                self._condition.wait_for(lambda: self.waiting or self.closed)
                if self.closed:
                    return
                self.running = job = self.waiting.popleft()
            self._generate(job)

    def _generate(self, job: Job) -> None:
        try:
            for piece in pieces(self.model, self.vocabulary, job):
                if job.over.is_set():
                    return
                if piece.text or piece.finish:
                    job.loop.call_soon_threadsafe(job.put, piece)
        except FloatingPointError as error:
            problem = UserError(f"{self.where}: {error}: its run has diverged; choose another with --step")
            job.loop.call_soon_threadsafe(job.put, problem)
        except Exception as error:  # one request must not end the others
            complain(f"error: a request failed\n{traceback.format_exc()}")
            job.loop.call_soon_threadsafe(job.put, error)
