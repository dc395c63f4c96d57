"""Where the time of a run went, over all its attempts.

Each attempt keeps an account, `<run.dir>/ledger/attempt-00001.json`: the seconds of rank 0's clock by phase. `ledger`
adds them up, along the run's lineage, with the time between attempts and the steps that were computed twice.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Annotated

from pydantic import Field, TypeAdapter

from mingpt.cli.console import Say, counted
from mingpt.files.folder import Folder
from mingpt.observe.events import AttemptEnded, AttemptFailed, AttemptStarted, Event, StepDone
from mingpt.observe.runfile import RunFile
from mingpt.snapshot.attempts import NO_END, REWIND, Count, Record, line_of, records
from mingpt.world.clock import PAUSED, Clock

NAME = re.compile(r"attempt-([0-9]{5,})\.json")
NOTE_SECONDS = 1.0  # between two notes: what a killed attempt has not noted counts as "between attempts"
# Before the first step, as they come; a start need not have all of them.
STARTING = ("import", "data", "rendezvous", "device", "compiler", "model", "restore", "observers")
STEPS = ("compile", "step", "wait", "exchange", "update")  # the phases of a step: computed twice, it costs all again
TWICE, BETWEEN = "computed twice", "between attempts"
GROUPS = {  # what people want to know, by the clock's phases; the rest is "other"
    "training": ("step", "exchange", "update"),
    "start-up": ("launch", *STARTING, "load", "compile"),  # load: in older accounts, from device on
    "data wait": ("wait",),
    "snapshots": ("snapshot",),
    "evaluation": ("evaluation",),
    PAUSED: (PAUSED,),
    TWICE: (TWICE,),
    BETWEEN: (BETWEEN,),
}


Number = Annotated[float, Field(gt=-(2.0**53), lt=2.0**53, allow_inf_nan=False)]


@dataclass
class Account:
    """One attempt. started, until: Unix seconds. seconds: by phase of the clock; they add up to until - started.

    end: "finished", "stopped", "failed: …"; None: it was killed, or is still training. price: of all machines, per
    hour.
    """

    attempt: Count
    from_step: Count
    step: Count
    world_size: Count
    device: str
    host: str
    started: Number
    until: Number
    seconds: dict[str, Number]
    end: str | None = None
    price: Number | None = None

    @property
    def processes(self) -> str:
        """How many on what: `4 × cuda`; "" for a rewind."""
        return " × ".join(str(part) for part in (self.world_size, self.device) if part)


ACCOUNT = TypeAdapter(Account)


class Accountant:
    """Keeps this attempt's account: noted at its start, every NOTE_SECONDS, and at its end."""

    def __init__(
        self, run_dir: str, clock: Clock, price: float | None, say: Say, now: Callable[[], float] = time.time
    ) -> None:
        self.run_dir, self.clock, self.price, self.say, self.now = run_dir, clock, price, say, now
        self.account: Account | None = None
        self.file: RunFile | None = None

    def on(self, event: Event) -> None:
        if isinstance(event, AttemptStarted):
            self._open(event)
        account = self.account
        if account is None:
            return
        match event:
            case StepDone():
                account.step = event.step
                if self.now() - account.until < NOTE_SECONDS:
                    return
            case AttemptEnded():
                account.end = "finished" if event.finished else "stopped"
            case AttemptFailed():
                account.end = f"failed: {event.reason}"
            case AttemptStarted():
                pass
            case _:
                return
        self._write(account)

    def _open(self, event: AttemptStarted) -> None:
        self.file = RunFile(self.run_dir, f"ledger/attempt-{event.attempt:05d}.json", self.say, "ledger", replaced=True)
        self.account = Account(
            attempt=event.attempt,
            from_step=event.start,
            step=event.start,
            world_size=event.world_size,
            device=event.device,
            host=event.host,
            started=self.now() - sum(self.clock.account().values()),
            until=self.now(),
            seconds={},
            price=self.price,
        )

    def _write(self, account: Account) -> None:
        assert self.file
        account.until, account.seconds = self.now(), self.clock.account()
        self.file.replace(json.dumps(asdict(account)).encode())
        if account.end:
            self.file.close()
            if account.end == "finished":
                self.say(goodput_line(ledger(self.run_dir)))


@dataclass(frozen=True)
class Ledger:
    """seconds: by the clock's phases, TWICE and BETWEEN. wall: from the first attempt's start to the last one's end.

    ran: of all attempts together; more than wall if some overlap. trained: the steps that the run kept. goodput: its
    share of ran.
    """

    accounts: list[Account]
    seconds: dict[str, float]
    wall: float

    @property
    def ran(self) -> float:
        return sum(account.until - account.started for account in self.accounts)

    @property
    def trained(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in GROUPS["training"])

    @property
    def goodput(self) -> float:
        return self.trained / self.ran if self.ran else 0.0

    def groups(self) -> dict[str, float]:
        """Seconds by the names that people read, which add up to ran and BETWEEN; "other" is what no group has."""
        found = {name: sum(self.seconds.get(phase, 0.0) for phase in phases) for name, phases in GROUPS.items()}
        if not found[PAUSED]:  # hardly ever
            del found[PAUSED]
        return found | {"other": self.ran + found[BETWEEN] - sum(found.values())}

    def cost(self) -> float | None:
        """What the attempts that know run.price_per_hour have cost; None if there is none."""
        known = [a.price * (a.until - a.started) / 3600 for a in self.accounts if a.price is not None]
        return sum(known) if known else None


def accounts(run_dir: str) -> list[Account]:
    """The accounts that can be read, by attempt."""
    folder = Folder(run_dir)
    files = folder.find("ledger", NAME)
    raw = folder.read_all(files)
    read = {int(f.match[1]): _decode(int(f.match[1]), raw[f.name]) for f in files if f.name in raw}
    return [account for _, account in sorted(read.items()) if account]


def _decode(attempt: int, raw: bytes) -> Account | None:
    """The account that a file holds; None if it is damaged, or somebody has made it up."""
    try:
        account = ACCOUNT.validate_json(raw, strict=True)
    except ValueError:
        return None
    return account if account.attempt == attempt else None


def kept_until(claims: Mapping[int, Record], done: Mapping[int, int]) -> dict[int, int]:
    """By attempt, the last step that the run kept of it, along the lineage of the newest one.

    done: the last step of each attempt that is known. An attempt that was killed had come as far as the next one's
    start, whatever is known of it.
    """
    kept = {number: claims[number].from_step if number in claims else step for number, step in done.items()}
    for number, (start, end) in line_of(claims).items():
        if number in claims and claims[number].by != REWIND:
            kept[number] = done.get(number, start) if end == NO_END else end
    return kept


def ledger(run_dir: str) -> Ledger:
    """That of a run."""
    return added_up(accounts(run_dir), records(run_dir))


def added_up(found: list[Account], claims: Mapping[int, Record]) -> Ledger:
    """All attempts together. Two attempts at once count twice, except in `wall`."""
    kept, seconds = kept_until(claims, {a.attempt: a.step for a in found}), Counter[str]()
    for account in found:
        steps = max(account.step, kept[account.attempt]) - account.from_step
        lost = 1 - (kept[account.attempt] - account.from_step) / steps if steps > 0 else 0.0
        for phase, spent in account.seconds.items():
            again = spent * lost if phase in STEPS else 0.0
            seconds[phase] += spent - again  # type: ignore[assignment]
            seconds[TWICE] += again  # type: ignore[assignment]
    ends = [*accumulate((a.until for a in found), max)]
    for end, after in zip(ends, found[1:], strict=False):
        seconds[BETWEEN] += max(0.0, after.started - end)  # type: ignore[assignment]
    wall = max(ends, default=0.0) - min((a.started for a in found), default=0.0)
    return Ledger(found, dict(seconds), wall)


def goodput_line(known: Ledger) -> str:
    """`goodput 93.1% of 2 h 10 min in 3 attempts; the rest: start-up 4.0%, …`, the largest first.

    Nobody may have wanted to train between attempts, so the share of all the time stands by itself.
    """
    ran, between = known.ran, known.seconds.get(BETWEEN, 0.0)
    groups = {name: spent for name, spent in known.groups().items() if name not in ("training", BETWEEN)}
    shares = [(spent / ran, name) for name, spent in groups.items() if spent >= 0.001 * ran > 0]
    rest = ", ".join(f"{name} {share:.1%}" for share, name in sorted(shares, reverse=True))
    count = counted(len(known.accounts), "attempt")
    cost = "" if (spent := known.cost()) is None else f", cost {spent:.2f}"
    whole = f"; {known.trained / known.wall:.1%} of all {duration(known.wall)}, with the time between attempts"
    return (
        f"goodput {known.goodput:.1%} of {duration(ran)} in {count}{cost}{f'; the rest: {rest}' if rest else ''}"
        f"{whole if between >= 0.001 * known.wall > 0 else ''}"
    )


def duration(seconds: float) -> str:
    """`41 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    units = [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)]
    whole = round(seconds)
    for (large, size), (small, part) in pairwise(units):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {large}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"
