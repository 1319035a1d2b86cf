"""A hub of data sets on the loopback: the calls of repositories, commits and large files."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_a_token_of_the_tests"


@dataclass
class Repo:
    """A data set: its files by path, small ones as bytes and large ones by digest, and its
    commits."""

    private: bool = False
    files: dict[str, bytes | str] = field(default_factory=dict)
    commits: list[tuple[str, list[str]]] = field(default_factory=list)  # sha, paths

    @property
    def head(self) -> str:
        return self.commits[-1][0]

    def commit(self, files: dict[str, bytes | str]) -> str:
        self.files |= files
        sha = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits.append((sha, sorted(files)))
        return sha


class Hub:
    """What the server holds.

    Attributes:
        objects: large files by their digest.
        faults: by kind of request, what happens to the next ones in the place of an answer: a
            status, a status with the seconds after which to come again, or "cut".
        requests: how many came, by kind.
        before_commit: is called with a repository before its next commits are looked at.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: dict[str, list[Any]] = {}
        self.requests: Counter[str] = Counter()
        self.before_commit: list[Any] = []
        self.url = ""
        self.lock = threading.RLock()

    def content(self, repo: str, path: str) -> bytes:
        found = self.repos[repo].files[path]
        return self.objects[found] if isinstance(found, str) else found


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_PUT = do_HEAD = do_GET

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        kind = _kind(self.command, path)
        hub = self.hub
        with hub.lock:
            hub.requests[kind] += 1
            fault = hub.faults[kind].pop(0) if hub.faults.get(kind) else None
        if fault == "cut":
            self.rfile.read(min(10, int(self.headers.get("Content-Length", 0))))
            self.connection.close()
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault is not None and fault != "after":
            status, after = fault if isinstance(fault, tuple) else (fault, None)
            self._answer(
                status, {"error": "a fault"}, {} if after is None else {"Retry-After": after}
            )
            return
        if kind != "upload" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "who are you"})
            return
        with hub.lock:
            answer = getattr(self, f"_{kind}")(path, body)
        if fault == "after":  # it has happened, and nobody is told
            self.connection.close()
            self.close_connection = True
            return
        self._answer(*answer)

    def _answer(self, status: int, content: Any, headers: dict[str, Any] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _create(self, _: str, body: bytes) -> tuple[Any, ...]:
        asked = json.loads(body)
        assert asked["type"] == "dataset"
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.hub.repos:
            return 409, {"error": "it is there", "url": f"{self.hub.url}/datasets/{name}"}
        repo = self.hub.repos[name] = Repo(
            bool(asked.get("private")) or asked.get("visibility") == "private"
        )
        repo.commit({".gitattributes": b"*.parquet filter=lfs\n"})
        return 200, {"url": f"{self.hub.url}/datasets/{name}"}

    def _info(self, path: str, _: bytes) -> tuple[Any, ...]:
        name = "/".join(path.split("/")[3:5])
        if name not in self.hub.repos:
            return 404, {"error": "no such set"}
        repo = self.hub.repos[name]
        return 200, {"id": name, "sha": repo.head, "private": repo.private, "siblings": []}

    def _tree(self, path: str, _: bytes) -> tuple[Any, ...]:
        repo = self.hub.repos["/".join(path.split("/")[3:5])]
        assert path.split("/")[6] == repo.head
        items = []
        for name, content in repo.files.items():
            if isinstance(content, str):
                size = len(self.hub.objects[content])
                lfs = {"oid": content, "size": size, "pointerSize": 130}
                items.append(
                    {"type": "file", "path": name, "size": size, "oid": "0" * 40, "lfs": lfs}
                )
            else:
                oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                items.append({"type": "file", "path": name, "size": len(content), "oid": oid})
        return 200, items

    def _yaml(self, _: str, body: bytes) -> tuple[Any, ...]:
        assert json.loads(body)["content"].startswith("---\n")
        return 200, {"errors": [], "warnings": []}

    def _preupload(self, path: str, body: bytes) -> tuple[Any, ...]:
        files = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(".parquet") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for one in json.loads(body)["files"]
        ]
        return 200, {"files": files}

    def _batch(self, path: str, body: bytes) -> tuple[Any, ...]:
        objects: list[dict[str, Any]] = []
        for one in json.loads(body)["objects"]:
            upload = {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}}
            objects.append({**one, **({} if one["oid"] in self.hub.objects else upload)})
        return 200, {"transfer": "basic", "objects": objects}

    def _upload(self, path: str, body: bytes) -> tuple[Any, ...]:
        oid = path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "other bytes"}
        self.hub.objects[oid] = body
        return 200, {}

    def _commit(self, path: str, body: bytes) -> tuple[Any, ...]:
        name = "/".join(path.split("/")[3:5])
        repo = self.hub.repos[name]
        if self.hub.before_commit:
            self.hub.before_commit.pop(0)(repo)
        lines = [json.loads(line) for line in body.splitlines()]
        if lines[0]["value"].get("parentCommit") != repo.head:
            return 412, {"error": "a commit has happened since"}
        files: dict[str, bytes | str] = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del repo.files[value["path"]]
            elif line["key"] == "lfsFile":
                assert len(self.hub.objects[value["oid"]]) == value["size"]
                files[value["path"]] = value["oid"]
            else:
                assert line["key"] == "file"
                files[value["path"]] = base64.b64decode(value["content"])
        sha = repo.commit(files)
        return 200, {"commitUrl": f"{self.hub.url}/datasets/{name}/commit/{sha}", "commitOid": sha}

    def _resolve(self, path: str, _: bytes) -> tuple[Any, ...]:
        user, name, _resolve, _head, file = path.split("/", 6)[2:]
        repo = self.hub.repos[f"{user}/{name}"]
        if file not in repo.files:
            return 404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"}
        content = self.hub.content(f"{user}/{name}", file)
        etag = hashlib.sha1(content).hexdigest()
        return 200, content, {"X-Repo-Commit": repo.head, "ETag": f'"{etag}"'}


def _kind(method: str, path: str) -> str:
    parts = path.split("/")
    if path == "/api/repos/create":
        return "create"
    if path == "/api/validate-yaml":
        return "yaml"
    if method == "PUT":
        return "upload"
    if path.endswith("/info/lfs/objects/batch"):
        return "batch"
    if parts[1] == "api" and len(parts) > 5:
        return {"tree": "tree", "preupload": "preupload", "commit": "commit"}[parts[5]]
    return "info" if parts[1] == "api" else "resolve"


@contextmanager
def logged_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on which this process is logged in; nothing waits for long."""
    from huggingface_hub import constants

    with hub_server() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "".join(template[1:])
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
        yield found


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub that answers at its `url` until the body ends."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
