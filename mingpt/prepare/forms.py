"""What a source of text can hold, and how its name tells that."""

from typing import Literal

Form = Literal["text", "jsonl", "csv", "parquet"]
FORMS: dict[str, Form] = {
    "txt": "text", "text": "text", "md": "text", "jsonl": "jsonl", "ndjson": "jsonl", "json": "jsonl", "csv": "csv",
    "parquet": "parquet", "pq": "parquet",
}  # fmt: skip
PACKED = {"gz", "zst"}
