"""Notices of preemption, read from a server on loopback that speaks the metadata protocols of three clouds."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fault_kit import LONG, STEPS, at_step, finish, launch
from mingpt.world import notice
from node_kit import Node, free_port, pending, wait_until
from run_kit import Run


class Metadata(ThreadingHTTPServer):
    """taken: the machine is to be taken away. asked: the paths that were asked for."""

    taken = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        self.server.asked.append(self.path)
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200 if known else 400, "a-token")

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        taken, headers = self.server.taken, self.headers
        if self.path == "/latest/meta-data/spot/instance-action":
            if headers["X-aws-ec2-metadata-token"] != "a-token":
                self.answer(401)
            else:
                self.answer(*((200, '{"action": "terminate", "time": "2026-11-22T21:00:00Z"}') if taken else (404, "")))
        elif self.path == "/computeMetadata/v1/instance/preempted" and headers["Metadata-Flavor"] == "Google":
            self.answer(200, "TRUE" if taken else "FALSE")
        elif self.path.startswith("/metadata/scheduledevents?api-version=") and headers["Metadata"] == "true":
            other = {"EventType": "Preempt", "Resources": ["other"]}
            own = {"EventType": "Preempt", "Resources": ["mine"]}
            self.answer(200, json.dumps({"DocumentIncarnation": 1, "Events": [other, own] if taken else [other]}))
        elif self.path.startswith("/metadata/instance/compute/name?") and headers["Metadata"] == "true":
            self.answer(200, "mine")
        else:
            self.answer(400)

    def answer(self, code: int, text: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_each_clouds_notice_is_read(cloud: str, metadata: Metadata) -> None:
    assert not notice.ASK[cloud](metadata.url)
    metadata.taken = True
    assert notice.ASK[cloud](metadata.url)


@pytest.mark.parametrize(
    ("file", "text", "cloud"),
    [
        ("sys_vendor", "Amazon EC2", "aws"),
        ("product_name", "Google Compute Engine", "gcp"),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "azure"),
        ("sys_vendor", "QEMU", ""),
    ],
)
def test_the_firmware_says_whose_machine_it_is(file: str, text: str, cloud: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(f"{text}\n")
    assert notice.cloud_of_machine(tmp_path) == cloud


def test_nobody_is_asked_on_another_machine_or_where_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "cloud_of_machine", lambda: "")
    for where in ("auto", "none"):
        assert not notice.Notice(where, lambda: None, lambda text: None).cloud


def test_a_notice_asks_to_stop_once_and_limits_the_last_snapshot(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice, "ASK_EVERY_SECONDS", 0.01)
    stopped, said = threading.Event(), list[str]()
    watched = notice.Notice(f"gcp:{metadata.url}/", stopped.set, said.append)
    watched.watch()
    assert watched.grace_seconds() == 0
    metadata.taken = True
    assert stopped.wait(200)
    assert 1 <= watched.grace_seconds() <= 20
    assert said == ["gcp takes this machine away in 30 s or less: asked to stop"]


def test_an_address_without_an_answer_is_reported_once_and_asked_again(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice, "ASK_EVERY_SECONDS", 0.01)
    asks, said, again = list[int](), list[str](), threading.Event()

    def ask(address: str) -> bool:
        asks.append(1)
        if len(asks) < 5:
            return notice.ask_gcp(f"http://127.0.0.1:{port}")
        return True

    port = free_port()
    monkeypatch.setattr(notice, "ASK", {"gcp": ask})
    notice.Notice(f"gcp:{metadata.url}", again.set, said.append).watch()
    assert again.wait(200)
    assert ["can't be read" in line for line in said] == [True, False]


@pytest.mark.slow
def test_a_run_of_two_processes_stops_at_a_notice_and_resumes_with_the_same_bits(
    metadata: Metadata, new_run: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    """Process 0 asks every five seconds; process 1 is held at step 20 until it has the answer."""
    run, held = new_run(f"world.notice=aws:{metadata.url}"), list[int]()

    def take_away() -> None:
        held.append(node.workers()[1])
        os.kill(held[0], signal.SIGSTOP)
        metadata.taken = True

    node = Node(launch(run), on_line=at_step(20, take_away))
    wait_until(lambda: "aws takes this machine away" in node.output, "the notice")
    wait_until(lambda: signal.SIGTERM in pending(held[0]), "the request")
    os.kill(held[0], signal.SIGCONT)
    output = finish(node, 75)
    assert output.count("aws takes this machine away in 120 s or less: asked to stop") == 1
    assert "stopped on request" in output.splitlines()[-1]
    assert run.store.steps()[0] < STEPS
    metadata.taken = False
    finish(Node(launch(run)), 0)
    assert run.digest() == undisturbed(*LONG).digest()
