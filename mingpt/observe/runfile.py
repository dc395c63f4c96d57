"""A file below run.dir that grows, or is replaced, while the run trains. Metrics, trace and ledger are such files."""

import threading
import time
from contextlib import suppress
from io import FileIO

from mingpt.cli.console import Say
from mingpt.files.folder import Folder

UPLOAD_SECONDS = 15  # between two uploads of new content to a bucket
LOCAL_SECONDS = 1  # between two writes of a local file that is replaced
LAST_SECONDS = 10  # the longest wait for a bucket when the attempt ends


class RunFile:
    """What is appended to a local file is written at once. A bucket can't append: a thread uploads the whole.

    A file that is `replaced` is written by the thread on a local disk, too. A write that fails does not end the run:
    the content stays in memory and is written with what comes next. It is reported once, and again when writing works.
    what: the name of the content in these lines.
    """

    def __init__(self, run_dir: str, name: str, say: Say, what: str = "metrics", replaced: bool = False) -> None:
        self.say, self.what, self.replaced = say, what, replaced
        self.folder, self.name = Folder(run_dir), name
        self.local = self.folder.local
        self.content = bytearray()  # local: what is not written yet; bucket: all
        self.changed, self.failing = False, False
        self._written = 0  # bytes of the local file that are known to be whole
        self._file: FileIO | None = None
        self._storing = threading.Lock()  # held while writing; a bucket's `append` does not take it
        self._closed = threading.Event()
        self.in_thread = replaced or not self.local
        self._started = False

    def append(self, data: bytes) -> None:
        self.content += data
        self._tell()

    def replace(self, data: bytes) -> None:
        """data: the whole file."""
        self.content = bytearray(data)
        self._tell()

    def _tell(self) -> None:
        self.changed = True
        if not self.in_thread:
            self.flush()
        elif not self._started:
            self._started = True
            threading.Thread(target=self._write, name=self.what, daemon=True).start()

    def flush(self) -> None:
        """Write or upload what is new. Reports an error, and raises none."""
        with self._storing:
            if not self.changed:
                return
            self.changed = False  # before the content is read: what comes meanwhile is for the next time
            try:
                with self.folder.named_errors():
                    self._store()
            except Exception as error:  # any: in the uploading thread nothing else would report it
                if not self.failing:
                    again = f"The run goes on; {'it is' if self.replaced else 'they are'} tried again."
                    self.say(f"{self.what.upper()} can't be written: {error}. {again}")
                self.failing = self.changed = True
                return
            if self.failing:
                self.say(f"{self.what} {'is' if self.replaced else 'are'} written again")
            self.failing = False

    def _store(self) -> None:
        if self.local and not self.replaced:
            self._append()
        else:
            self.folder.write(self.name, bytes(self.content), sync=False)

    def _append(self) -> None:
        if self._file is None:
            self._file = FileIO(self.folder.open_to_append(self.name), "ab")
            if self._written:
                self._file.truncate(self._written)  # a failed write may have left a part
        new = bytes(self.content)
        try:
            left = memoryview(new)
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            self._drop_file()
            raise
        self._written += len(new)
        del self.content[: len(new)]

    def _drop_file(self) -> None:
        broken, self._file = self._file, None
        if broken is not None:
            with suppress(OSError):  # nothing is buffered
                broken.close()

    def _write(self) -> None:
        pause = LOCAL_SECONDS if self.local else UPLOAD_SECONDS
        if self.replaced:  # what is known of an attempt from its start is known if it is killed soon
            self.flush()
        while not self._closed.wait(pause):
            self.flush()
        while self.changed:  # see finish()
            self.flush()
            if self.changed:
                time.sleep(pause)

    def finish(self) -> None:
        """Nothing more will come. Waits for nothing: a thread goes on until all is written."""
        self._closed.set()
        if not self.in_thread:
            self.close()

    def close(self) -> None:
        """Write the rest; a store that does not answer is left after LAST_SECONDS."""
        self._closed.set()
        if not self.in_thread:
            self.flush()
            self._drop_file()
            return
        last = threading.Thread(target=self.flush, name=self.what, daemon=True)
        last.start()
        last.join(LAST_SECONDS)
        if last.is_alive():
            self.say(f"{self.what.upper()}: run.dir={self.folder.url} does not answer: the newest may be missing there")
