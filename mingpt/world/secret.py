"""The names of our rendezvous backends, and the secret that the nodes of a job with a c10d rendezvous share.

Imports only the standard library: mingpt.launch checks the secret before torch is imported.
"""

import hashlib
import hmac
from collections.abc import Mapping, MutableMapping

from mingpt.errors import UserError

STATIC, C10D = "mingpt-static", "mingpt-c10d"
SECRET = "MINGPT_RDZV_SECRET"
SHORTEST = 16  # characters
MAC_BYTES = hashlib.sha256().digest_size
REFUSED = (
    "the rendezvous' state was not written with this job's secret, and is not read: set the same MINGPT_RDZV_SECRET on "
    "all nodes; if they have the same, somebody else reaches the rendezvous' port: close it to all but the nodes"
)


def check_secret(environment: Mapping[str, str]) -> None:
    """Raise UserError unless the environment has a secret of at least SHORTEST characters."""
    if len(environment.get(SECRET, "")) >= SHORTEST:
        return
    what = "is not set" if not environment.get(SECRET) else f"is shorter than {SHORTEST} characters"
    raise UserError(
        f"{SECRET} {what}: whoever reaches the port of a c10d rendezvous can run code on every node, so its nodes "
        f"share a secret: set {SECRET} to the same value on all of them (openssl rand -hex 32); or give each node its "
        f"number, which needs no secret: --node-rank=0, 1, … with --master-addr=HOST of node 0"
    )


def take_secret(environment: MutableMapping[str, str]) -> str:
    """Remove the secret from the environment, so that workers do not inherit it, and return it."""
    check_secret(environment)
    return environment.pop(SECRET)


def signed(secret: str, context: str, content: bytes) -> bytes:
    """The content after its HMAC. context: what it is, so that it can't be taken for something else."""
    # The zero byte ends the context: else part of a context could be taken for the beginning of a content.
    return hmac.digest(secret.encode(), f"{context}\0".encode() + content, "sha256") + content


def verified(secret: str, context: str, stored: bytes) -> bytes:
    """The content of what `signed` has made. Raises ValueError if its HMAC is wrong."""
    content = stored[MAC_BYTES:]
    if not hmac.compare_digest(stored, signed(secret, context, content)):
        raise ValueError(REFUSED)
    return content
