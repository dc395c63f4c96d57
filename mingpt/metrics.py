"""`from mingpt.metrics import read_metrics`: see observe/jsonl.py."""

from mingpt.observe.jsonl import read_metrics as read_metrics
