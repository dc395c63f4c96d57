"""A hostile snapshot, or the web server that it lies on, costs a reader little memory, whatever it promises."""

import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from mingpt.errors import Damaged, UserError
from mingpt.model.kinds.gpt import GPTModel
from mingpt.snapshot.format import Part, TensorInfo, header_of
from mingpt.snapshot.manifest import MANIFEST_LIMIT, MOST_VALUES, decode_manifest, encode_manifest
from mingpt.snapshot.reader import PARALLEL_PARTS, read, read_manifest, verify
from mingpt.snapshot.staging import StagedPart
from mingpt.snapshot.store import Store
from mingpt.snapshot.storewriter import StoreWriter
from snapshot_kit import PROVENANCE, digest_of, equal, save, signed, state_of

MIB = 2**20
# A command that has imported torch takes some 240 MiB.
CHILD = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", *sys.argv[1:]], capture_output=True, text=True, timeout=600)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print(done.returncode)
print(done.stdout, done.stderr)
"""


def peak(*command: str) -> tuple[int, int, str]:
    """A command's largest size in MiB, exit code and output. Measured by a parent of its own, which is small."""
    done = subprocess.run([sys.executable, "-c", CHILD, *command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    size, code, told = done.stdout.split("\n", 2)
    return int(size) // 1024, int(code), told


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(Store(str(tmp_path / "snapshots")), 3)
    return tmp_path


def sparse(run: Path, shape: list[int]) -> str:
    """Replaces the weights by one tensor, of which there is nothing on the disk."""
    folder = run / "snapshots/step-000000003"
    header = header_of({"a": TensorInfo(dtype="F32", shape=shape, sha256="0" * 64, part="")})
    name = f"model-00001-{sha256(header + b'0' * 64).hexdigest()[:16]}.safetensors"
    (folder / name).write_bytes(header)
    size = len(header) + 4 * torch.Size(shape).numel()
    os.truncate(folder / name, size)
    fields = json.loads((folder / "manifest.json").read_text())
    parts = {n: p for n, p in fields["parts"].items() if n.startswith("optimizer")}
    tensors = {n: t for n, t in fields["tensors"].items() if t["part"] in parts}
    fields["parts"] = parts | {name: {"size": size}}
    fields["tensors"] = tensors | {"a": {"dtype": "F32", "shape": shape, "sha256": "0" * 64, "part": name}}
    fields["digest"] = digest_of(fields["tensors"])
    (folder / "manifest.json").write_bytes(signed(fields))
    return name


@pytest.mark.slow
@pytest.mark.parametrize("command", ["verify", "copy"])
def test_a_part_that_is_long_and_takes_no_room_is_hashed_as_a_stream(run: Path, command: str) -> None:
    name = sparse(run, [2**20, 256])  # 1 GiB
    target = [str(run / "target")] if command == "copy" else []
    size, code, told = peak("mingpt.snapshots", command, str(run), *target)
    assert code == 1
    assert f"{name}: a does not match its checksum in the manifest" in told
    assert size < 450


def test_an_honest_state_is_verified_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.snapshot.pieces.PIECE_BYTES", 1000)
    monkeypatch.setattr("mingpt.snapshot.pieces.RANGE_BYTES", 1000)
    state = {
        "model": {f"w{i}": torch.arange(i * 100.0) for i in range(20)} | {"empty": torch.zeros(0, 4)},
        "optimizer": {"s": torch.ones(())},
    }
    pieces: list[int] = []

    def watched_room(size: int) -> memoryview:
        pieces.append(size)
        return memoryview(bytearray(size))

    for url in (str(tmp_path / "snapshots"), "memory://streamed/snapshots"):
        store = Store(url)
        save(store, 1, state)  # type: ignore[arg-type]
        with monkeypatch.context() as watched:
            watched.setattr("mingpt.snapshot.pieces._buffer", watched_room)
            manifest = verify(store, 1)
        assert manifest == read_manifest(store, 1)
        assert max(pieces) <= 1000
        assert equal(read(store, 1).state, state)  # type: ignore[arg-type]
        [name] = (n for n in manifest.parts if n.startswith("model"))
        good = store.fs.cat_file(f"{store.folder(1)}/{name}")
        for position in range(0, len(good), 997):  # wherever a piece ends
            bad = bytearray(good)
            bad[position] ^= 1
            store.fs.pipe_file(f"{store.folder(1)}/{name}", bytes(bad))
            with pytest.raises(Damaged, match=f"^{name}"):
                verify(store, 1)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "export"])
@pytest.mark.parametrize("shape", [{"n_layer": 24, "n_embd": 2048}, {"n_layer": 2**31 - 1, "n_embd": 4}])
def test_the_config_of_a_huge_model_in_a_small_snapshot_takes_no_memory(
    tmp_path: Path, command: str, shape: dict[str, int]
) -> None:
    settings = GPTModel.model_validate({"n_head": 4, "block_size": 1024} | shape).model_dump()
    provenance = PROVENANCE | {"config": {"model": settings}}
    save(Store(str(tmp_path / "snapshots")), 3, provenance=provenance)
    arguments = {
        "generate": ["mingpt.generate", str(tmp_path)],
        "export": ["mingpt.snapshots", "export", str(tmp_path), f"{tmp_path}/out"],
    }
    size, code, told = peak(*arguments[command])
    assert code == 64, told
    assert f"step-000000003: not a snapshot of a GPT of this version: n_layer={shape['n_layer']}, and 2 tensors" in told
    assert size < 500


# Manifests


def changed(run: Path, change: Callable[[dict[str, Any]], None]) -> int:
    """Signs the manifest again; returns its length."""
    path = run / "snapshots/step-000000003/manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_bytes(signed(fields))
    return path.stat().st_size


def many_tensors(fields: dict[str, Any]) -> None:
    tensor = {"dtype": "F32", "shape": [0], "sha256": "0" * 64, "part": next(iter(fields["parts"]))}
    fields["tensors"] |= {f"t{i}": tensor for i in range(225_000)}
    fields["digest"] = digest_of(fields["tensors"])


def long_text(fields: dict[str, Any]) -> None:
    """The character makes Python take four bytes for each of the others."""
    fields["vocabulary"]["characters"] = "\U0001f600" + "a" * (MANIFEST_LIMIT - 10_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "problem", "most"),
    [
        (many_tensors, f"DAMAGED: manifest.json holds more than {MOST_VALUES} values", 550),
        (long_text, "looks good", 1000),  # as long as a vocabulary may be
    ],
)
def test_a_manifest_as_long_as_may_be_takes_bounded_memory(
    run: Path, change: Callable[[dict[str, Any]], None], problem: str, most: int
) -> None:
    assert MANIFEST_LIMIT * 0.85 < changed(run, change) <= MANIFEST_LIMIT
    size, _, told = peak("mingpt.snapshots", "list", str(run))
    assert problem in told
    assert size < most


@pytest.mark.slow
def test_as_many_values_as_may_be_take_bounded_memory(run: Path) -> None:
    def change(fields: dict[str, Any]) -> None:
        fields["config"]["a"] = [{} for _ in range(MOST_VALUES // 2 - 100)]

    changed(run, change)
    size, code, told = peak("mingpt.snapshots", "list", str(run))
    assert code == 0, told
    assert size < 600


@pytest.mark.parametrize(
    "raw", [b'{"a":[' + b"[]," * MOST_VALUES + b"[]]}", b'{"' + b'":"' * 2 * MOST_VALUES, b"[" * MOST_VALUES + b"["]
)
def test_json_that_no_writer_of_ours_makes_is_refused_before_it_is_parsed(raw: bytes) -> None:
    with pytest.raises(Damaged, match=f"manifest.json holds more than {MOST_VALUES} values"):
        decode_manifest(raw)


def test_marks_inside_a_text_are_no_values(run: Path) -> None:
    """A tokenizer.json is full of them, and of quotes."""
    text = '{"a\\\\": [1, 2], "\\"": {}},\n' * 200_000
    changed(run, lambda fields: fields["vocabulary"].update(characters=text))
    assert read_manifest(Store(f"{run}/snapshots"), 3).vocabulary["characters"] == text


def test_a_manifest_that_no_reader_would_take_is_not_written(run: Path) -> None:
    """Else a run would write snapshots for days that are set aside when they are needed."""
    manifest = read_manifest(Store(f"{run}/snapshots"), 3)
    for vocabulary in ({"text": "a" * MANIFEST_LIMIT}, {"list": [0] * (MOST_VALUES + 1)}):
        with pytest.raises(UserError, match="take a smaller vocabulary"):
            encode_manifest(manifest.model_copy(update={"vocabulary": vocabulary}))


def test_the_largest_gpt_2_fits_many_times(run: Path) -> None:
    manifest = read_manifest(Store(f"{run}/snapshots"), 3)
    [tensor, *_] = manifest.tensors.values()
    names = [f"transformer.h.{i % 48}.{i}.exp_avg_sq" for i in range(4 * 580)]
    of_xl = manifest.model_copy(update={"tensors": dict.fromkeys(names, tensor)})
    assert len(encode_manifest(of_xl)) < 2**20


# Web servers


class Liar(BaseHTTPRequestHandler):
    """Lists a snapshot, and of its files tells sizes that have nothing to do with what it sends."""

    folder: Path
    lies: dict[str, str]  # of a file's beginning: what is done for it
    over: Event

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.folder / self.path.strip("/")
        if not path.exists():
            self.send_error(404)
            return
        if path.is_dir():
            content = "".join(f'<a href="{p.name}{"/" * p.is_dir()}">x</a>' for p in path.iterdir()).encode()
        else:
            content = path.read_bytes()
        lie = next((lie for name, lie in self.lies.items() if path.name.startswith(name)), "")
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
def liar(run: Path) -> Iterator[str]:
    Liar.folder, Liar.lies, Liar.over = run, {}, Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    Liar.over.set()
    server.shutdown()
    server.server_close()


def test_this_server_can_tell_the_truth(liar: str) -> None:
    store = Store(f"{liar}/snapshots")
    assert store.steps() == [3]
    assert equal(read(store, 3).state, state_of(3))
    assert verify(store, 3) == read_manifest(store, 3)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["manifest", "model"])
def test_what_a_web_server_sends_without_end_is_not_taken_into_memory(liar: str, file: str) -> None:
    Liar.lies = {file: "endless"}
    size, code, told = peak("mingpt.snapshots", "verify", liar)
    assert code == 1, told
    assert "bytes that its server announces" in told
    assert size < 450
    with pytest.raises(Damaged, match="bytes that its server announces"):
        read(Store(f"{liar}/snapshots"), 3)


@pytest.mark.parametrize("file", ["manifest", "model"])
def test_what_a_web_server_cuts_off_is_a_matter_of_the_network(liar: str, file: str) -> None:
    Liar.lies = {file: "short"}
    with pytest.raises((ConnectionError, OSError)):
        verify(Store(f"{liar}/snapshots"), 3)


def test_a_web_server_that_falls_silent_is_not_waited_for(liar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINGPT_STORE_SECONDS", "1")
    Liar.lies = {"manifest": "silent"}
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="no answer within 1 s"):
        verify(Store(f"{liar}/snapshots"), 3)
    assert time.monotonic() - began < 50  # the server's own end


def test_a_part_that_is_written_is_not_kept(tmp_path: Path) -> None:
    """The writer's thread puts slices together part by part: they are there only until they are written."""
    alive, most = set[int](), 0

    def staged() -> Iterator[StagedPart]:
        nonlocal most
        for i in range(4 * PARALLEL_PARTS):
            tensor = torch.full((100,), float(i))
            alive.add(i)
            weakref.finalize(tensor.untyped_storage(), alive.remove, i)
            most = max(most, len(alive))
            yield Part("model", i + 1, (f"w{i}",)), {f"w{i}": tensor}
            del tensor

    written = StoreWriter(Store(str(tmp_path)), PROVENANCE, log=print).write_parts(3, staged())
    assert len(written["parts"]) == len(written["tensors"]) == 4 * PARALLEL_PARTS
    assert most <= PARALLEL_PARTS + 1
    assert alive == set()
