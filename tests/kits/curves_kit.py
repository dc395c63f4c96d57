"""Reads back what W&B's offline mode has written."""

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_records(run_dir: str) -> Iterator[Any]:
    """Its files are LevelDB's logs of its own messages."""
    from wandb.proto import wandb_internal_pb2 as messages

    for path in sorted(Path(run_dir, "wandb/wandb").glob("offline-run-*/*.wandb")):
        raw, at, message = path.read_bytes(), 7, b""  # after the file's header
        while at + 7 <= len(raw):
            if 32768 - at % 32768 < 7:  # what is left of a block and can't hold a header
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack("<HB", raw[at + 4 : at + 7])
            message += raw[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last piece
                yield messages.Record.FromString(message)  # type: ignore[attr-defined]
                message = b""


def of_wandb(run_dir: str) -> dict[str, list[tuple[int, float]]]:
    """The values that W&B has of each curve, with their steps."""
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in wandb_records(run_dir):
        for item in record.history.item:
            curves[item.key or item.nested_key[0]].append((record.history.step.num, json.loads(item.value_json)))
    return {key: values for key, values in curves.items() if not key.startswith("_")}
