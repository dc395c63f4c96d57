"""Where this node stands among the nodes of its job, as the platform's environment variables tell it."""

from collections.abc import Mapping
from dataclasses import dataclass

from mingpt.errors import Mistake


@dataclass(frozen=True)
class Placement:
    """One node's place: all that a torchrun command needs to know of the others."""

    platform: str
    addresses: tuple[str, ...]  # one a node, the head's first
    rank: int  # this node's place in `addresses`
    gpus: int  # of this node
    job: str  # the same on all nodes and after a recovery, different for every job

    @property
    def head(self) -> str:
        return self.addresses[0]

    @property
    def own(self) -> str:
        return self.addresses[self.rank]


def skypilot(environment: Mapping[str, str]) -> Placement | None:
    """SkyPilot's distributed-job variables; None outside of SkyPilot. Raises Mistake if they contradict each other."""
    if "SKYPILOT_NODE_IPS" not in environment:
        return None
    addresses = tuple(environment["SKYPILOT_NODE_IPS"].split())
    try:
        rank = int(environment["SKYPILOT_NODE_RANK"])
        nodes = int(environment.get("SKYPILOT_NUM_NODES", len(addresses)))
        gpus = int(environment.get("SKYPILOT_NUM_GPUS_PER_NODE") or 0)
    except KeyError as error:
        raise Mistake(
            "SKYPILOT_NODE_IPS is set in the environment, but not SKYPILOT_NODE_RANK: set both, or none"
        ) from error
    except ValueError as error:
        raise Mistake(
            f"SkyPilot's variables SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES, SKYPILOT_NUM_GPUS_PER_NODE: {error}: set "
            f"numbers, or unset SKYPILOT_NODE_IPS"
        ) from error
    if nodes != len(addresses) or not 0 <= rank < nodes:
        raise Mistake(
            f"SkyPilot's variables contradict each other: SKYPILOT_NUM_NODES={nodes}, SKYPILOT_NODE_RANK={rank}, and "
            f"{len(addresses)} addresses in SKYPILOT_NODE_IPS: correct them, or unset SKYPILOT_NODE_IPS"
        )
    return Placement("SkyPilot", addresses, rank, gpus, environment.get("SKYPILOT_TASK_ID", "sky"))


PLATFORMS = (skypilot,)


def find_placement(environment: Mapping[str, str]) -> Placement | None:
    """This node's place as the first platform tells it that is there; None on a machine of one's own."""
    return next((p for platform in PLATFORMS if (p := platform(environment))), None)
