"""A hub as Hugging Face's, on loopback: what its client asks to read a dataset, to read a model and to push one.

Files come from a second address, as they do from the real one's CDN. Whatever else is asked for is kept in `strange`.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from pathlib import Path
from threading import Event
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from tests.kits.web_kit import Quiet, serving

LIMIT = 300  # seconds that an answer is held back at most
CONSTANTS = "huggingface_hub.constants"


@dataclass
class Repository:
    """token: what a reader needs; empty: it is public. gated: terms have to be accepted first.

    visibility: what its maker asked for.
    """

    token: str = ""
    gated: bool = False
    visibility: str = ""
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    main: str = ""

    def commit(self, files: Mapping[str, bytes]) -> str:
        """Set all files, and move `main` there."""
        self.main = sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[self.main] = dict(files)
        return self.main


@dataclass
class Hub:
    """What the hub has and does, to be changed by a test at any time, and what it was asked."""

    cdn: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    strange: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)  # COMMIT/PATH of each part of a file that was sent
    carried: list[str] = field(default_factory=list)  # what came to the CDN as Authorization
    failing: int = 0  # the status that is answered in place of a file
    writer: str = ""  # the token that may push; empty: nobody may
    listing: Event = field(default_factory=Event)  # no folder is listed before


class _Handler(Quiet):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[Hub]

    def answer(self, code: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path.strip("/"))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match path.split("/"):
            case ["api", "validate-yaml"]:
                self.json({"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                self.create(json.loads(body))
            case ["api", "models", owner, name, "preupload", _]:
                self.preupload(json.loads(body)["files"])
            case ["api", "models", owner, name, "commit", "main"]:
                self.push(f"{owner}/{name}", [json.loads(line) for line in body.splitlines()])
            case ["datasets", owner, name, "resolve", revision, *rest] | [owner, name, "resolve", revision, *rest]:
                self.resolve(f"{owner}/{name}", revision, "/".join(rest))
            case ["cdn", owner, name, commit, *rest]:
                self.file(self.hub.repositories[f"{owner}/{name}"].commits[commit], commit, "/".join(rest))
            case ["api", _, owner, name]:
                self.api(f"{owner}/{name}", "main", "revision", "")
            case ["api", _, owner, name, ("revision" | "tree") as what, revision, *rest]:
                self.api(f"{owner}/{name}", revision, what, "/".join(rest))
            case _:
                self.hub.strange.append(f"{self.command} {self.path}")
                self.answer(404)

    do_HEAD = do_POST = do_PUT = do_GET

    def json(self, fields: object, code: int = 200) -> None:
        self.answer(code, json.dumps(fields).encode(), Content_Type="application/json")

    def create(self, wanted: Mapping[str, str]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        if self.may_write():
            made = name not in self.hub.repositories
            repository = self.hub.repositories.setdefault(name, Repository(visibility=wanted.get("visibility", "")))
            if made:
                repository.commit({".gitattributes": b""})
            about = {"url": f"http://{self.headers['Host']}/{name}", "name": name, "type": "model", "id": name}
            self.json(about, 200 if made else 409)

    def may_write(self) -> bool:
        may = bool(self.hub.writer) and self.headers.get("Authorization") == f"Bearer {self.hub.writer}"
        if not may:
            self.answer(403 if "Authorization" in self.headers else 401)
        return may

    def preupload(self, files: list[dict[str, str]]) -> None:
        if self.may_write():
            self.json({"files": [f | {"uploadMode": "regular", "shouldIgnore": False} for f in files]})

    def push(self, name: str, operations: list[dict[str, Any]]) -> None:
        if self.may_write():
            repository = self.hub.repositories[name]
            files = dict(repository.commits[repository.main])
            for operation in operations:
                about = operation["value"]
                if operation["key"] == "file":
                    files[about["path"]] = base64.b64decode(about["content"])
            sha = repository.commit(files)
            self.json({"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{sha}", "commitOid": sha})

    def commit(self, name: str, revision: str) -> str:
        """The commit that a revision stands for; empty: refused, and answered so, as the hub does."""
        repository = self.hub.repositories.get(name)
        given = self.headers.get("Authorization", "")
        if not repository or (repository.token and given != f"Bearer {repository.token}"):
            self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif repository.gated:
            self.answer(403, X_Error_Code="GatedRepo", X_Error_Message="Access to this dataset is restricted")
        elif (sha := repository.main if revision == "main" else revision) in repository.commits:
            return sha
        else:
            self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        return ""

    def api(self, name: str, revision: str, what: str, folder: str) -> None:
        if sha := self.commit(name, revision):
            about: object = {"id": name, "sha": sha, "private": False, "siblings": []}
            if what == "tree" and not (about := self.tree(self.hub.repositories[name].commits[sha], folder)):
                self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="not found")
            else:
                self.json(about)

    def tree(self, files: Mapping[str, bytes], folder: str) -> list[dict[str, object]]:
        self.hub.listing.wait(LIMIT)
        prefix, found = f"{folder}/" if folder else "", dict[str, dict[str, object]]()
        for path in sorted(path for path in files if path.startswith(prefix)):
            name, *below = path.removeprefix(prefix).split("/")
            if below and "recursive=true" in self.path:
                name, below = "/".join([name, *below]), []
            entry: dict[str, object] = {"type": "directory" if below else "file", "path": prefix + name, "size": 0}
            entry["oid"] = sha1(entry["path"].encode() if below else files[path]).hexdigest()  # type: ignore[attr-defined]
            if not below:
                entry |= {"size": len(files[path]), "xetHash": sha256(files[path]).hexdigest()}
            found[name] = entry
        return list(found.values())

    def resolve(self, name: str, revision: str, path: str) -> None:
        if not (sha := self.commit(name, revision)):
            return
        if (content := self.hub.repositories[name].commits[sha].get(path)) is None:
            self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            return
        where = f"{self.hub.cdn}/cdn/{name}/{sha}/{path}?X-Signature=s3cret"
        self.answer(
            302,
            Location=where,
            X_Repo_Commit=sha,
            X_Linked_Size=str(len(content)),
            X_Linked_Etag=f'"{sha256(content).hexdigest()}"',
        )

    def file(self, files: Mapping[str, bytes], commit: str, path: str) -> None:
        if (given := self.headers.get("Authorization")) is not None:
            self.hub.carried.append(given)
        if self.hub.failing:
            self.answer(self.hub.failing)
            return
        content = files[path]
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        self.hub.read.append(f"{commit}/{path}")
        whole = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self.answer(206, part, ETag=f'"{sha256(content).hexdigest()}"', Content_Range=whole)


@contextmanager
def hub(home: Path) -> Iterator[Hub]:
    """A hub, which the client uses, here and in processes that are started. home: for the client's own files."""
    state = Hub()
    state.listing.set()
    handler = type("Handler", (_Handler,), {"hub": state})
    with serving(handler) as url, serving(handler) as cdn, pytest.MonkeyPatch.context() as patch:
        state.cdn = cdn.replace("127.0.0.1", "localhost")
        patch.setenv("HF_ENDPOINT", url)
        patch.setenv("HF_HOME", str(home))
        patch.delenv("HF_TOKEN", raising=False)
        # What the client has read of the environment when it was imported.
        patch.setattr(f"{CONSTANTS}.ENDPOINT", url)
        patch.setattr(f"{CONSTANTS}.HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(f"{CONSTANTS}.HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(f"{CONSTANTS}.HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(f"{CONSTANTS}.HF_HUB_DISABLE_XET", True)  # its client is not Python's
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        yield state
