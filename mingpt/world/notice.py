"""A cloud's notice that it takes this machine away becomes the ordinary request to stop.

One process of each node asks the cloud's metadata address, in a thread of its own: only where the machine's firmware
tables name that cloud, or where world.notice names an address. Nothing waits for the answers. Imports only the standard
library.
"""

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from mingpt.cli.console import Say
from mingpt.world.env import Env

FIRMWARE = Path("/sys/class/dmi/id")
METADATA = "http://169.254.169.254"  # of all three; Google's name for it would need a name server
AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
# What each cloud leaves from the notice to the end, by its documentation.
SECONDS = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
ASK_EVERY_SECONDS = 5.0
ANSWER_SECONDS = 2.0
ANSWER_BYTES = 100_000
# Of a notice's time, this part is for the last snapshot; the rest for the step that runs and for leaving.
SNAPSHOT_SHARE = 2 / 3
OPENER = build_opener(ProxyHandler({}))  # a metadata address is never asked through a proxy

Ask = Callable[[str], bool]


def cloud_of_machine(firmware: Path = FIRMWARE) -> str:
    """aws, gcp, azure; or nothing: no cloud that gives notice."""

    def read(name: str) -> str:
        try:
            return (firmware / name).read_text().strip()
        except OSError:  # another system, or a container that hides it
            return ""

    if read("sys_vendor") == "Amazon EC2" or read("board_vendor") == "Amazon EC2":
        return "aws"
    if read("product_name") == "Google Compute Engine":
        return "gcp"
    return "azure" if read("chassis_asset_tag") == AZURE_ASSET_TAG else ""


def read(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    with OPENER.open(Request(url, headers=dict(headers), method=method), timeout=ANSWER_SECONDS) as answer:
        text: bytes = answer.read(ANSWER_BYTES)
    return text.decode()


def ask_aws(address: str) -> bool:
    """Ask by IMDSv2: a token first. 404 means that nothing is planned."""
    token = read(f"{address}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    try:
        action = read(f"{address}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except HTTPError as error:
        if error.code == http.client.NOT_FOUND:
            return False
        raise
    return json.loads(action)["action"] in ("terminate", "stop", "hibernate")


def ask_gcp(address: str) -> bool:
    return read(f"{address}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}).strip() == "TRUE"


def ask_azure(address: str) -> bool:
    """Ask for a Preempt event of this machine; others of its set are listed, too."""
    headers = {"Metadata": "true"}
    events = json.loads(read(f"{address}/metadata/scheduledevents?api-version=2020-07-01", headers))["Events"]
    preempted = set[str]()
    for event in events:
        if event["EventType"] == "Preempt":
            preempted.update(event["Resources"])
    if not preempted:
        return False
    name = read(f"{address}/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers).strip()
    return name in preempted


ASK: Mapping[str, Ask] = {"aws": ask_aws, "gcp": ask_gcp, "azure": ask_azure}


class Notice:
    """Asks until a notice comes. grace_seconds: for the last snapshot, from now on; 0 as long as there is no notice."""

    def __init__(self, where: str, stop: Callable[[], None], log: Say) -> None:
        """where: world.notice. stop: called once, when the notice has come."""
        cloud, _, address = where.partition(":")
        if where == "auto":
            cloud = cloud_of_machine()
        elif where == "none":
            cloud = ""
        self.cloud = cloud
        self.address = address.rstrip("/") or METADATA
        self.stop, self.log = stop, log
        self._came: float | None = None

    def grace_seconds(self) -> float:
        if self._came is None:
            return 0
        # Never 0, which says that there is no notice. A snapshot that has a second may still reach the hot tier.
        return max(SECONDS[self.cloud] * SNAPSHOT_SHARE - (time.monotonic() - self._came), 1.0)

    def watch(self) -> None:
        """Ask from now on, in a thread; nothing if there is nobody to ask."""
        if self.cloud:
            threading.Thread(target=self._watch, name="notice", daemon=True).start()

    def _watch(self) -> None:
        complained = False
        while True:
            # A metadata server that is slow, or not up yet, is no reason to stop asking, and is told once.
            try:
                if ASK[self.cloud](self.address):
                    break
            except (URLError, OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                if not complained:
                    self.log(
                        f"{self.cloud}'s notices of preemption can't be read from {self.address} "
                        f"({str(error) or type(error).__name__}): asking on; world.notice=none asks no more"
                    )
                complained = True
            time.sleep(ASK_EVERY_SECONDS)
        self._came = time.monotonic()
        self.log(f"{self.cloud} takes this machine away in {SECONDS[self.cloud]:g} s or less: asked to stop")
        self.stop()


def watch(where: str, log: Say) -> Notice:
    """The notices of this node, asked by its first process."""
    env = Env.read()
    # A notice is as a SIGTERM to the launcher, which stops all its workers, or to this process, whose step carries the
    # request to all. So there is one way to stop, and one exit code.
    notice = Notice(where, lambda: os.kill(env.agent or os.getpid(), signal.SIGTERM), log)
    if not env.local_rank:
        notice.watch()
    return notice
