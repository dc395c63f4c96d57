"""profile.steps: a trace of some steps by torch.profiler, which https://ui.perfetto.dev opens, and its top ten."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from mingpt.cli.console import Say
from mingpt.config.schema import steps_to_profile
from mingpt.files.folder import Folder
from mingpt.observe.background import Background
from mingpt.observe.events import AttemptEnded, AttemptFailed, AttemptStarted, Event, StepDone

END_SECONDS = 60.0  # at the end of an attempt, for writing the trace


class Profile:
    """In rank 0. The main thread records; another one writes.

    On CUDA a step's event comes when the next step is under way: `late` is 1 there, else 0.
    """

    def __init__(self, steps: str, run_dir: str, attempt: int, cuda: bool, say: Say) -> None:
        self.steps, self.late, self.cuda, self.say = steps_to_profile(steps), int(cuda), cuda, say
        self.run_dir, self.attempt, self.asked, self.start = run_dir, attempt, steps, 0
        self._profile: profile | None = None
        self._step: record_function | None = None
        self._written: Background[profile] | None = None

    def on(self, event: Event) -> None:
        match event:
            case AttemptStarted():
                self.start = event.start
                if self.late and self.steps.start == event.start + 2:  # no event marks where that step begins
                    self.steps = range(self.steps.start + 1, max(self.steps.stop, self.steps.start + 2))
                self.steps = range(self.steps.start, min(self.steps.stop, event.last_step + 1))
                self._next(event.start + 1)
            case StepDone():
                self._next(event.step + 1 + self.late)
            case AttemptEnded() | AttemptFailed():
                self._next(self.steps.stop)
                if self._written:
                    self._written.close(END_SECONDS)
                elif self.start < self.steps.stop - 1:
                    ended = f"this attempt ended after step {event.step}"
                    self.say(f"profile.steps={self.asked}: nothing is recorded: {ended}")

    def _next(self, step: int) -> None:
        """Step number `step` begins now."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if step in self.steps and self._written is None:
            if self._profile is None:
                activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
                self._profile = profile(activities=activities)
                self._profile.start()
            self._step = record_function(f"ProfilerStep#{step}")
            self._step.__enter__()
        elif self._profile is not None and self._written is None:
            self._profile.stop()
            self._written = Background("profile.steps", self._opened, self.say)
            self._written.put(self._profile)

    @contextmanager
    def _opened(self) -> Iterator[Callable[[profile], None]]:
        yield self._write

    def _write(self, recorded: profile) -> None:
        order = "self_cuda_time_total" if self.cuda else "self_cpu_time_total"
        top = recorded.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=80)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json.gz")
            recorded.export_chrome_trace(str(trace))
            contents = {"json.gz": trace.read_bytes(), "txt": top.encode()}
        name = f"attempt-{self.attempt:05d}-steps-{self.steps.start}-{self.steps.stop}"
        for kind, content in contents.items():
            Folder(self.run_dir).write(f"profile/{name}.{kind}", content)
        where = f"{self.run_dir.rstrip('/')}/profile/{name}"
        self.say(f"profile: {where}.json.gz, for https://ui.perfetto.dev; its top ten: {where}.txt")
