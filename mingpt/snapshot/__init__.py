"""Snapshots: the format, the store, the writer, the reader."""
