"""A hub as Hugging Face's, on loopback: the part of its protocol that reading a dataset takes.

Files come from a second address, as they do from the real one's CDN. Whatever else is asked for is kept in `strange`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

PAGE = 3  # entries of a listing; the real hub's have 1,000
LIMIT = 300  # seconds that an answer is held back at most
CONSTANTS = "huggingface_hub.constants"


@dataclass
class Repository:
    """token: what a reader needs; empty: it is public. gated: terms have to be accepted first."""

    token: str = ""
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    main: str = ""

    def commit(self, files: Mapping[str, bytes]) -> str:
        """Set all files, and move `main` there."""
        self.main = sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[self.main] = dict(files)
        return self.main


@dataclass
class Hub:
    url: str = ""
    cdn: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    strange: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)  # COMMIT/PATH of each part of a file that was sent
    sent: int = 0  # bytes of files
    carried: list[str] = field(default_factory=list)  # what came to the CDN as Authorization
    failing: int = 0  # the status that is answered in place of a file
    held: dict[str, Event] = field(default_factory=dict)  # by path: it is not answered before the event
    asked: dict[str, Event] = field(default_factory=dict)  # by path: set when it is asked for

    def hold(self, path: str) -> Event:
        """Answer no request for this file; the event that is returned says that one has come."""
        self.held[path], self.asked[path] = Event(), Event()
        return self.asked[path]

    def release(self) -> None:
        for event in self.held.values():
            event.set()
        self.held.clear()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[Hub]

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def json(self, value: object, **headers: str) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[0] == "cdn":
            self.file(parts[1], parts[2], "/".join(parts[3:]))
        elif parts[:2] == ["api", "datasets"] and len(parts) >= 4:
            self.api("/".join(parts[2:4]), parts[4:])
        elif parts[0] == "datasets" and parts[3:4] == ["resolve"]:
            self.resolve("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))
        else:
            self.hub.strange.append(f"{self.command} {self.path}")
            self.answer(404)

    do_HEAD = do_POST = do_GET

    def files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """The files of a commit; None: refused, and answered so, as the hub does."""
        repository = self.hub.repositories.get(name)
        given = self.headers.get("Authorization", "")
        if not repository or (repository.token and given != f"Bearer {repository.token}"):
            self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            return None
        if repository.gated:
            self.answer(403, X_Error_Code="GatedRepo", X_Error_Message="Access to this dataset is restricted")
            return None
        sha = repository.main if revision == "main" else revision
        if sha not in repository.commits:
            self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
            return None
        return repository.commits[sha]

    def sha(self, name: str, revision: str) -> str:
        return self.hub.repositories[name].main if revision == "main" else revision

    def api(self, name: str, rest: list[str]) -> None:
        what, revision, path = (rest or ["revision"])[0], (rest[1:2] or ["main"])[0], "/".join(rest[2:])
        if (files := self.files(name, revision)) is None:
            return
        if what == "revision":
            self.json({"id": name, "sha": self.sha(name, revision), "private": False, "siblings": []})
        elif what == "tree":
            self.tree(files, path)
        else:
            self.hub.strange.append(f"{self.command} {self.path}")
            self.answer(404)

    def tree(self, files: dict[str, bytes], folder: str) -> None:
        if folder in self.hub.held:
            self.hub.held[folder].wait(LIMIT)
        query = parse_qs(urlsplit(self.path).query)
        prefix, found = f"{folder}/" if folder else "", dict[str, dict[str, object]]()
        for path, content in sorted(files.items()):
            if not path.startswith(prefix):
                continue
            names = path.removeprefix(prefix).split("/")
            for depth in range(1, len(names)):
                above = prefix + "/".join(names[:depth])
                found[above] = {"type": "directory", "path": above, "size": 0, "oid": sha1(above.encode()).hexdigest()}
            oid, lfs = sha1(content).hexdigest(), {"oid": sha256(content).hexdigest(), "size": len(content)}
            lfs["pointerSize"] = 130
            found[path] = {
                "type": "file",
                "path": path,
                "size": len(content),
                "oid": oid,
                "lfs": lfs,
                "xetHash": sha256(content).hexdigest(),
            }
        if query.get("recursive") not in (["true"], ["True"]):
            found = {path: entry for path, entry in found.items() if "/" not in path.removeprefix(prefix)}
        if not found:
            self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="not found")
            return
        start = int(query.get("cursor", ["0"])[0])
        entries, more = list(found.values()), {}
        if start + PAGE < len(entries):
            place = self.path.partition("?")[0]
            rest = f"recursive={query.get('recursive', ['false'])[0]}&cursor={start + PAGE}"
            more["Link"] = f'<{self.hub.url}{place}?{rest}>; rel="next"'
        self.json(entries[start : start + PAGE], **more)

    def resolve(self, name: str, revision: str, path: str) -> None:
        files = self.files(name, revision)
        if files is None:
            return
        if path not in files:
            self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            return
        owner, _, short = name.partition("/")
        commit = self.sha(name, revision)
        where = f"{self.hub.cdn}/cdn/{owner}%2F{short}/{commit}/{path}?X-Signature=s3cret"
        self.answer(302, Location=where, X_Repo_Commit=commit, X_Linked_Etag=f'"{sha256(files[path]).hexdigest()}"')

    def file(self, name: str, commit: str, path: str) -> None:
        if (given := self.headers.get("Authorization")) is not None:
            self.hub.carried.append(given)
        if path in self.hub.held:
            self.hub.asked[path].set()
            self.hub.held[path].wait(LIMIT)
        if self.hub.failing:
            self.answer(self.hub.failing)
            return
        content = self.hub.repositories[name].commits[commit][path]
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        self.hub.read.append(f"{commit}/{path}")
        self.hub.sent += len(part)
        whole = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self.answer(206, part, ETag=f'"{sha256(content).hexdigest()}"', Content_Range=whole)


@contextmanager
def hub(home: Path) -> Iterator[Hub]:
    """A hub, which the client uses, here and in processes that are started. home: for the client's own files."""
    state = Hub()
    handler = type("Handler", (_Handler,), {"hub": state})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
    state.url, state.cdn = f"http://127.0.0.1:{servers[0].server_port}", f"http://localhost:{servers[1].server_port}"
    for server in servers:
        Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", state.url)
        patch.setenv("HF_HOME", str(home))
        patch.delenv("HF_TOKEN", raising=False)
        # What the client has read of the environment when it was imported.
        patch.setattr(f"{CONSTANTS}.ENDPOINT", state.url)
        patch.setattr(
            f"{CONSTANTS}.HUGGINGFACE_CO_URL_TEMPLATE", state.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(f"{CONSTANTS}.HF_TOKEN_PATH", str(home / "token"))
        try:
            yield state
        finally:
            state.release()
            for server in servers:
                server.shutdown()
                server.server_close()
