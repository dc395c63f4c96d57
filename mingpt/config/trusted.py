"""What is taken from the config in a snapshot, which may be a stranger's, and what the command line must say again."""

import re

from mingpt.redact import without_secrets

# What a snapshot's config may say of the place of its data. No web address: that could be one of this machine's own
# network, such as a cloud's metadata server. And the most that it may say of what costs memory and processors.
BUCKETS = ("s3", "gs", "gcs", "az", "abfs")
MOST = {"batch.micro_size": 256, "train.threads": 64}


def problems_of_places(value: object) -> list[str]:
    """What keeps the texts in a stored value from being taken for places. A stranger may have written them."""
    if isinstance(value, (list, dict)):
        return [p for v in (value.values() if isinstance(value, dict) else value) for p in problems_of_places(v)]
    if not isinstance(value, str):
        return []
    scheme, separator, _ = value.partition("://")
    if separator and "***" in value:
        return ["has a secret in its URL, and snapshots keep no secrets"]
    stored = f"is {str(without_secrets(value))!r} in the snapshot's config, which may be a stranger's"
    if "::" in value or not value.isprintable():
        return [f"{stored}: chained URLs and control characters are not taken from there"]
    if separator and scheme not in BUCKETS:
        return [f"{stored}: of URLs, only those of buckets ({', '.join(BUCKETS)}) are taken from there"]
    if not separator and (re.match("[/~\\\\]|[A-Za-z0-9+.-]*:", value) or ".." in re.split(r"[/\\]", value)):
        return [f"{stored}: of paths, only those below the working directory are taken from there"]
    return []


def problems_of_size(key: str, value: object) -> list[str]:
    """What keeps a stored number from being taken."""
    if not isinstance(value, int) or value <= MOST.get(key, value):
        return []
    return [
        f"{key}={value} in the snapshot's config: more than {MOST[key]} is not taken from a snapshot, which may be a "
        f"stranger's: give {key}=…"
    ]
