"""Multipart uploads that killed writers left unfinished. No listing of files shows them, and their bytes cost money.

S3 keeps them for ever. Google's and Azure's stores drop theirs after a week.
"""

from contextlib import suppress
from dataclasses import dataclass

from mingpt.snapshot.files import STEP_FOLDER
from mingpt.snapshot.format import PART_NAME
from mingpt.snapshot.store import Store


@dataclass(frozen=True)
class Upload:
    path: str  # below the store's URL
    identity: str
    started: float  # Unix time


def unfinished_uploads(store: Store) -> list[Upload]:
    """Up to 1,000 unfinished uploads of parts. Empty if the store is not S3, or does not let us list them."""
    if not hasattr(store.fs, "call_s3"):
        return []
    bucket, _, prefix = store.root.partition("/")
    try:
        answer = store.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/step-".lstrip("/"))
    except OSError:  # such as PermissionError: then a lifecycle rule of the bucket must remove them
        return []
    found = []
    for upload in answer.get("Uploads", ()):
        path = upload["Key"].removeprefix(prefix).lstrip("/")
        folder, _, name = path.partition("/")
        if STEP_FOLDER.fullmatch(folder) and PART_NAME.fullmatch(name):
            found.append(Upload(path, upload["UploadId"], upload["Initiated"].timestamp()))
    return found


def abort(store: Store, upload: Upload) -> None:
    """Another process may have aborted it already."""
    bucket, _, prefix = store.root.partition("/")
    key = f"{prefix}/{upload.path}".lstrip("/")
    with suppress(FileNotFoundError):
        store.fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.identity)
