"""Notices of preemption, read from a server on loopback that speaks the metadata protocols of three clouds."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mingpt.world import notice
from tests.kits.fault_kit import STEPS, at_step, finish, launch
from tests.kits.node_kit import Node, free_port, pending, wait_until
from tests.kits.run_kit import NewRun
from tests.kits.web_kit import Quiet, serving


def events(*names: str) -> str:
    return json.dumps({"Events": [{"EventType": "Preempt", "Resources": [name]} for name in names]})


# path -> the header that must come, and what is answered before and after the notice (None: 404)
ANSWERS: dict[str, tuple[str, str, str | None, str]] = {
    "PUT /latest/api/token": ("X-aws-ec2-metadata-token-ttl-seconds", "60", "a-token", "a-token"),
    "GET /latest/meta-data/spot/instance-action": (
        "X-aws-ec2-metadata-token", "a-token", None, '{"action": "terminate", "time": "2026-11-22T21:00:00Z"}'
    ),
    "GET /computeMetadata/v1/instance/preempted": ("Metadata-Flavor", "Google", "FALSE", "TRUE"),
    "GET /metadata/scheduledevents": ("Metadata", "true", events("other"), events("other", "mine")),
    "GET /metadata/instance/compute/name": ("Metadata", "true", "mine", "mine"),
}  # fmt: skip


@dataclass
class Metadata:
    url: str = ""
    taken: bool = False  # the machine is to be taken away


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    found = Metadata()

    class Answers(Quiet):
        def do_GET(self) -> None:
            header, value, before, after = ANSWERS[f"{self.command} {self.path.partition('?')[0]}"]
            text = after if found.taken else before
            self.send_response(401 if self.headers[header] != value else 404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        do_PUT = do_GET

    with serving(Answers) as found.url:
        yield found


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


def test_a_notice_asks_to_stop_once_and_limits_the_last_snapshot(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that gives no answer is reported once, and asked again."""
    asks, said, stopped, nowhere = list[str](), list[str](), threading.Event(), f"http://127.0.0.1:{free_port()}"

    def ask(address: str) -> bool:
        asks.append(address)
        return notice.ask_gcp(address if len(asks) > 4 else nowhere)

    monkeypatch.setattr(notice, "ASK_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(notice, "ASK", {"gcp": ask})
    watched = notice.Notice(f"gcp:{metadata.url}/", stopped.set, said.append)
    watched.watch()
    assert watched.grace_seconds() == 0
    metadata.taken = True
    assert stopped.wait(200)
    assert 1 <= watched.grace_seconds() <= 20
    assert ["world.notice" in line for line in said] == [True, False]


@pytest.mark.slow
def test_a_run_of_two_processes_stops_at_a_notice(metadata: Metadata, new_run: NewRun) -> None:
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
    assert output.count("aws takes this machine away") == 1
    assert run.store.steps()[0] < STEPS
