"""Shows how far `mingpt prepare` is: a bar on a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Sequence

from mingpt.console import say
from mingpt.prepare.sources import File

LOG_SECONDS, DRAW_SECONDS = 10.0, 0.1  # between two lines of a log; between two updates of the bar


class Progress:
    """most: the tokens at which it ends; 0: all files are read. tokens: those of earlier attempts."""

    def __init__(self, files: Sequence[File], most: int = 0, skip: int = 0, tokens: int = 0) -> None:
        self.total, self.most, self.tokens = max(1, sum(file.size for file in files)), most, tokens
        self.bytes = self.skipped = sum(file.size for file in files[:skip])
        self.began = self.last = time.monotonic()
        self.began_at = self.share()
        self.terminal = sys.stderr.isatty()

    def add(self, size: int, tokens: int) -> None:
        self.bytes, self.tokens = self.bytes + size, self.tokens + tokens
        now = time.monotonic()
        if now - self.last >= (DRAW_SECONDS if self.terminal else LOG_SECONDS):
            self.last = now
            self.show()

    def share(self) -> float:
        return min(1.0, max(self.bytes / self.total, self.tokens / self.most if self.most else 0.0))

    def show(self) -> None:
        share, seconds = self.share(), max(1e-9, time.monotonic() - self.began)
        speed = (self.bytes - self.skipped) / seconds
        left = seconds * (1 - share) / (share - self.began_at) if share > self.began_at else 0.0
        line = f"{share:4.0%}  {speed / 1e6:.1f} MB/s  {self.tokens:,} tokens  {left:.0f} s left"
        if self.terminal:
            print(f"\r\033[K[{'#' * int(share * 30):<30}] {line}", end="", file=sys.stderr, flush=True)
        else:
            say(f"prepare: {line}")

    def clear(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
