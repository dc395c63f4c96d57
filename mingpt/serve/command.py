"""What `mingpt serve` does: load the model, listen, and end within a limit when it is asked to."""

import argparse
import asyncio
import math
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mingpt.command import command
from mingpt.commands.loading import Opened, device_of, open_model
from mingpt.console import complain, say
from mingpt.data.vocabulary import TextVocabulary
from mingpt.errors import FINISHED, UserError
from mingpt.redact import printable
from mingpt.serve.__main__ import parser
from mingpt.storage import install

if TYPE_CHECKING:
    from mingpt.serve.app import Served

KEY = "MINGPT_SERVE_KEY"
KEYS = "a key is ASCII letters, digits and marks, without spaces: set one, or unset it"
AFTER_DRAIN = 5  # seconds for the last answers to be sent


def problems(options: argparse.Namespace) -> list[str]:
    least = {"queue": 0, "prompt-tokens": 1, "tokens": 1}
    whole = {name: getattr(options, name.replace("-", "_")) for name in least}
    return [
        *(f"--{name} {value}: at least {least[name]}" for name, value in whole.items() if value < least[name]),
        *([] if 0 < options.seconds < math.inf else [f"--seconds {options.seconds}: a number above 0"]),
        *([] if 0 <= options.drain < math.inf else [f"--drain {options.drain}: a number, 0 or more"]),
        *([] if 0 <= options.port < 2**16 else [f"--port {options.port}: from 0 to 65535"]),
        *([] if re.fullmatch("[!-~]+", os.environ.get(KEY, "none")) else [f"{KEY} in the environment: {KEYS}"]),
    ]


def text_vocabulary(opened: Opened) -> TextVocabulary:
    if not isinstance(opened.vocabulary, TextVocabulary):
        raise UserError(f"{opened.where}: this model's tokens are not text, so it can't continue one: choose another")
    return opened.vocabulary


def end_of_text(vocabulary: TextVocabulary, chat: bool) -> int | None:
    """The token that ends a text; conversations without one in the vocabulary end with a line feed, as they learned."""
    try:
        end: int | None = getattr(vocabulary, "end_of_text", None)
    except UserError:  # this tokenizer has none
        end = None
    return vocabulary.encode("\n")[0] if end is None and chat else end


def listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror}: choose another") from error


@command()
def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"mingpt serve needs {' and '.join(missing)}: {install('serve')}")
    if found := problems(options):
        raise UserError(*found)
    device = device_of(options.device)
    opened = open_model(options.url, options.step)
    text_vocabulary(opened)  # before it listens
    opened.model.to(device)
    with listen(options.host, options.port) as listening:
        return serve(opened, options, listening)


def served_of(opened: Opened, options: argparse.Namespace) -> "Served":
    from mingpt.serve.app import Served  # after the check, as in serve
    from mingpt.serve.worker import Worker

    config, vocabulary = opened.manifest.config, text_vocabulary(opened)
    data, run = config.get("data"), config.get("run")
    chat = isinstance(data, dict) and data.get("kind") == "chat"
    name = run.get("name") if isinstance(run, dict) else None
    return Served(
        worker=Worker(opened.model, vocabulary, opened.where, options.queue),
        vocabulary=vocabulary,
        name=printable(name) if isinstance(name, str) and name else "mingpt",
        step=opened.manifest.step,
        digest=opened.manifest.digest,
        chat=chat,
        ends=end_of_text(vocabulary, chat),
        most_prompt=options.prompt_tokens,
        most_tokens=options.tokens,
        seconds=options.seconds,
        key=os.environ.get(KEY),
    )


def serve(opened: Opened, options: argparse.Namespace, listening: socket.socket) -> int:
    import uvicorn

    from mingpt.serve.api import Refused
    from mingpt.serve.app import app_of

    served = served_of(opened, options)
    worker = served.worker

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:  # uvicorn's own ends the process with the signal
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop, loop)
            yield

        def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
            if self.should_exit:
                self.force_exit = True  # asked twice
            self.should_exit = worker.draining = True
            stopped = Refused(503, f"the server was stopped, and this took longer than {options.drain:g} s", "stopping")
            loop.call_later(0 if self.force_exit else options.drain, worker.end_all, stopped)

    server = Server(
        uvicorn.Config(
            app_of(served), lifespan="off", log_config=None, access_log=False, server_header=False, ws="none",
            timeout_graceful_shutdown=math.ceil(options.drain) + AFTER_DRAIN,
        )
    )  # fmt: skip
    host, port = listening.getsockname()[:2]
    say(f"{opened.where} (digest {opened.manifest.digest[:16]}) as {served.name}")
    say(f"serving at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)")
    if served.key is None and not (host.startswith("127.") or host == "::1"):
        complain(f"anybody who reaches {host}:{port} may use it: set {KEY} in the environment for a key")
    server.run(sockets=[listening])
    worker.close()
    return FINISHED
