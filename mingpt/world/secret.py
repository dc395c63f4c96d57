"""The names of our rendezvous backends, and the secret that the nodes of a job with a c10d rendezvous share.

Only the standard library is imported here: mingpt.launch asks before torch is imported.
"""

from collections.abc import Mapping, MutableMapping

from mingpt.errors import UserError

STATIC, C10D = "mingpt-static", "mingpt-c10d"
SECRET = "MINGPT_RDZV_SECRET"
SHORTEST = 16  # characters


def check_secret(environment: Mapping[str, str]) -> None:
    """Raise UserError unless the environment has a secret that nobody guesses."""
    if len(environment.get(SECRET, "")) >= SHORTEST:
        return
    what = "is not set" if not environment.get(SECRET) else f"is shorter than {SHORTEST} characters"
    raise UserError(
        f"{SECRET} {what}: who reaches the port of a c10d rendezvous runs code on every node, so its nodes share a "
        f"secret: set {SECRET} to one word on all of them (openssl rand -hex 32); or give each its number, and none is "
        f"needed: --node-rank=0, 1, … with --master-addr=HOST of node 0"
    )


def take_secret(environment: MutableMapping[str, str]) -> str:
    """The secret, which the workers then don't inherit."""
    check_secret(environment)
    return environment.pop(SECRET)
