"""`from mingpt.metrics import read_metrics`: see history/history.py."""

from mingpt.history.history import read_metrics as read_metrics
