"""Multipart uploads that killed writers left half done: no listing of files shows them, and their bytes are paid for.

S3 keeps them for ever; Google's and Azure's stores drop theirs after a week.
"""

from contextlib import suppress
from dataclasses import dataclass

from mingpt.snapshot.files import STEP_FOLDER
from mingpt.snapshot.format import PART_NAME
from mingpt.snapshot.store import Store


@dataclass(frozen=True)
class HalfUpload:
    path: str  # below the store's URL
    identity: str
    started: float  # Unix time


def half_uploads(store: Store) -> list[HalfUpload]:
    """Those of parts of ours, the first 1,000 of them; none where the store has none or may not be asked for them."""
    if not hasattr(store.fs, "call_s3"):
        return []
    bucket, _, prefix = store.root.partition("/")
    try:
        answer = store.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/step-".lstrip("/"))
    except OSError:  # such as PermissionError: then they are left to a rule of the bucket's
        return []
    found = []
    for upload in answer.get("Uploads", ()):
        path = upload["Key"].removeprefix(prefix).lstrip("/")
        folder, _, name = path.partition("/")
        if STEP_FOLDER.fullmatch(folder) and PART_NAME.fullmatch(name):
            found.append(HalfUpload(path, upload["UploadId"], upload["Initiated"].timestamp()))
    return found


def abort(store: Store, upload: HalfUpload) -> None:
    """Another process may be doing so, too."""
    bucket, _, prefix = store.root.partition("/")
    key = f"{prefix}/{upload.path}".lstrip("/")
    with suppress(FileNotFoundError):
        store.fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.identity)
