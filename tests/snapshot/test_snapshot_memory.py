"""A hostile snapshot, or the web server that it lies on, costs a reader little memory, whatever it promises."""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from mingpt.commands import generate
from mingpt.errors import USER_ERROR, Damaged, UserError
from mingpt.model.gpt2 import GPTModel
from mingpt.snapshot.format import Part, State, TensorInfo, header_of
from mingpt.snapshot.manifest import MANIFEST_LIMIT, MOST_VALUES, decode_manifest, encode_manifest
from mingpt.snapshot.reader import PARALLEL_PARTS, read, read_manifest, verify
from mingpt.snapshot.staging import StagedPart
from mingpt.snapshot.store import Store
from mingpt.snapshot.storewriter import StoreWriter
from snapshot_kit import PROVENANCE, digest_of, equal, save, signed, state_of

MIB = 2**20
# A command that has imported torch takes some 240 MiB. It is measured by a parent of its own, which is small.
CHILD = """
import resource, subprocess, sys
code = subprocess.run([sys.executable, "-m", "mingpt.snapshots", *sys.argv[1:]], timeout=600).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


def peak(*command: str) -> tuple[int, int, str]:
    """The exit code of `mingpt snapshots`, its largest size in MiB, and its output."""
    done = subprocess.run([sys.executable, "-c", CHILD, *command], capture_output=True, text=True, timeout=600)
    output = done.stdout + done.stderr
    *_, line = done.stdout.splitlines()
    code, size = line.split()
    return int(code), int(size), output


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "snapshots"))
    save(store, 3)
    return store


def sign_again(store: Store, **changes: Any) -> None:
    fields = json.loads(store.read_manifest(3)) | changes
    fields["digest"] = digest_of(fields["tensors"])
    Path(store.folder(3), "manifest.json").write_bytes(signed(fields))


@pytest.mark.slow
def test_a_part_that_is_long_and_takes_no_room_is_hashed_as_a_stream(store: Store) -> None:
    """One tensor of 1 GiB, of which there is nothing on the disk."""
    shape = [2**20, 256]
    header = header_of({"a": TensorInfo(dtype="F32", shape=shape, sha256="0" * 64, part="")})
    name = f"model-00001-{sha256(header + b'0' * 64).hexdigest()[:16]}.safetensors"
    part = Path(store.folder(3), name)
    part.write_bytes(header)
    size = len(header) + 4 * torch.Size(shape).numel()
    os.truncate(part, size)
    tensor = {"dtype": "F32", "shape": shape, "sha256": "0" * 64, "part": name}
    sign_again(store, parts={name: {"size": size}}, tensors={"a": tensor})
    code, most, output = peak("verify", store.url)
    assert code == 1
    assert f"{name}: a " in output
    assert most < 450


@pytest.mark.slow
def test_the_config_of_a_huge_model_in_a_small_snapshot_takes_no_memory(tmp_path: Path) -> None:
    for folder, layers in (("large", 24), ("endless", 2**31 - 1)):
        settings = GPTModel(n_head=4, block_size=1024, n_layer=layers, n_embd=2048).model_dump()
        save(Store(f"{tmp_path}/{folder}/snapshots"), 3, provenance=PROVENANCE | {"config": {"model": settings}})
    code, most, output = peak("export", f"{tmp_path}/large", f"{tmp_path}/out")
    assert code == USER_ERROR, output
    assert "n_layer=24" in output
    assert most < 500
    assert generate.main([f"{tmp_path}/endless"]) == USER_ERROR


@pytest.mark.parametrize("url", ["{}/streamed", "memory://streamed"])
def test_an_honest_state_is_verified_as_a_stream(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.snapshot.pieces.PIECE_BYTES", 1000)
    monkeypatch.setattr("mingpt.snapshot.pieces.RANGE_BYTES", 1000)
    weights = {f"w{i}": torch.arange(i * 100.0) for i in range(8)}
    state: State = {"model": weights | {"empty": torch.zeros(0, 4)}, "optimizer": {"s": torch.ones(())}}
    store = Store(url.format(tmp_path))
    save(store, 1, state)
    assert equal(read(store, 1).state, state)
    pieces: list[int] = []

    def room(size: int) -> memoryview:
        pieces.append(size)
        return memoryview(bytearray(size))

    monkeypatch.setattr("mingpt.snapshot.pieces._buffer", room)
    [name] = (n for n in verify(store, 1).parts if n.startswith("model"))
    assert max(pieces) <= 1000
    good = store.fs.cat_file(f"{store.folder(1)}/{name}")
    for position in range(0, len(good), 997):  # wherever a piece ends
        bad = bytearray(good)
        bad[position] ^= 1
        store.fs.pipe_file(f"{store.folder(1)}/{name}", bytes(bad))
        with pytest.raises(Damaged, match=f"^{name}"):
            verify(store, 1)


# Manifests


@pytest.mark.parametrize(
    "raw", [b'{"a":[' + b"[]," * MOST_VALUES + b"[]]}", b'{"' + b'":"' * 2 * MOST_VALUES, b"[" * MOST_VALUES + b"["]
)
def test_json_that_no_writer_of_ours_makes_is_refused_before_it_is_parsed(raw: bytes) -> None:
    with pytest.raises(Damaged, match=f"more than {MOST_VALUES}"):
        decode_manifest(raw)


def test_marks_inside_a_text_are_no_values(store: Store) -> None:
    """A tokenizer.json is full of them, and of quotes."""
    text = '{"a\\\\": [1, 2], "\\"": {}},\n' * 200_000
    sign_again(store, vocabulary={"characters": text})
    assert read_manifest(store, 3).vocabulary["characters"] == text


def test_a_manifest_that_no_reader_would_take_is_not_written_and_gpt2_xl_fits(store: Store) -> None:
    """Else a run would write snapshots for days that are set aside when they are needed."""
    manifest = read_manifest(store, 3)
    for vocabulary in ({"text": "a" * MANIFEST_LIMIT}, {"list": [0] * (MOST_VALUES + 1)}):
        with pytest.raises(UserError, match="vocabulary"):
            encode_manifest(manifest.model_copy(update={"vocabulary": vocabulary}))
    [tensor, *_] = manifest.tensors.values()
    names = [f"transformer.h.{i % 48}.{i}.exp_avg_sq" for i in range(4 * 580)]
    of_xl = manifest.model_copy(update={"tensors": dict.fromkeys(names, tensor)})
    assert len(encode_manifest(of_xl)) < MIB


# Web servers


class Liar(BaseHTTPRequestHandler):
    """Lists a snapshot, and of its files tells sizes that have nothing to do with what it sends."""

    folder: Path
    lie: tuple[str, str]  # a file's beginning, and what is done for it
    over: Event

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.folder / self.path.strip("/")
        if path.is_dir():
            content = "".join(f'<a href="{p.name}{"/" * p.is_dir()}">x</a>' for p in path.iterdir()).encode()
        elif path.exists():
            content = path.read_bytes()
        else:
            return self.send_error(404)
        lie = self.lie[1] if path.name.startswith(self.lie[0]) else ""
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if path.is_dir() else "application/octet-stream")
        if not body or lie != "endless":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        try:
            while body and lie == "endless":
                self.wfile.write(bytes(MIB))
            if body:
                self.wfile.write(content[: len(content) // 2] if lie else content)
                self.wfile.flush()
            if body and lie == "silent":
                self.over.wait(200)
        except OSError:  # the client has had enough
            pass


@pytest.fixture
def liar(tmp_path: Path, store: Store) -> Iterator[Store]:
    Liar.folder, Liar.lie, Liar.over = tmp_path, ("no file", ""), Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    yield Store(f"http://127.0.0.1:{server.server_port}/snapshots")
    Liar.over.set()
    server.shutdown()
    server.server_close()


def test_this_server_can_tell_the_truth(liar: Store) -> None:
    assert liar.steps() == [3]
    assert equal(read(liar, 3).state, state_of(3))
    assert verify(liar, 3) == read_manifest(liar, 3)


@pytest.mark.parametrize("file", ["manifest", pytest.param("model", marks=pytest.mark.slow)])
def test_what_a_web_server_sends_without_end_is_not_taken_into_memory(liar: Store, file: str) -> None:
    Liar.lie = (file, "endless")
    with pytest.raises(Damaged, match="announces"):
        read(liar, 3)
    if file == "model":
        code, most, output = peak("verify", liar.url)
        assert code == 1, output
        assert most < 450


@pytest.mark.parametrize("file", ["manifest", "model"])
def test_what_a_web_server_cuts_off_is_a_matter_of_the_network(liar: Store, file: str) -> None:
    Liar.lie = (file, "short")
    with pytest.raises((ConnectionError, OSError)):
        verify(liar, 3)


def test_a_web_server_that_falls_silent_is_not_waited_for(liar: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINGPT_STORE_SECONDS", "1")
    Liar.lie = ("manifest", "silent")
    with pytest.raises(ConnectionError, match="1 s"):
        verify(Store(liar.url), 3)
    assert not Liar.over.is_set()


def test_a_part_that_is_written_is_not_kept(store: Store) -> None:
    """The writer's thread puts slices together part by part: they are there only until they are written."""
    alive, most = weakref.WeakSet[torch.Tensor](), 0

    def staged() -> Iterator[StagedPart]:
        nonlocal most
        for i in range(4 * PARALLEL_PARTS):
            tensor = torch.full((100,), float(i))
            alive.add(tensor)
            most = max(most, len(alive))
            yield Part("model", i + 1, (f"w{i}",)), {f"w{i}": tensor}
            del tensor

    assert len(StoreWriter(store, PROVENANCE, log=print).write_parts(4, staged())["parts"]) == 4 * PARALLEL_PARTS
    assert most <= PARALLEL_PARTS + 1
    assert len(alive) == 0
