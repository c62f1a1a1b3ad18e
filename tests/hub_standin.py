"""A Hugging Face hub on the loopback address: the HTTP that `huggingface_hub` and `datasets` ask for, files in memory.

    with serving() as hub:
        hub.models["org/tiny"] = Repository({"config.json": b"{}"})
        hub.disturb(r"GET .*/model.safetensors$", status(503))

Repositories, branches, gates and faults may be changed while it serves; `requests` says what was asked.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Files = dict[str, bytes]
REVISION = r"([^/]+)"
REPOSITORY = re.compile(rf"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)(?:/{REVISION}(/.+)?)?)?")
FILE = re.compile(rf"/(datasets/)?([^/]+/[^/]+)/resolve/{REVISION}/(.+)")


class Repository:
    """Files by branch. gated: served only with the hub's `token`."""

    def __init__(self, main: Files) -> None:
        self.branches = {"main": main}
        self.gated = False


@dataclass
class Hub:
    """What is served, and what was asked. token: that which opens gated repositories."""

    url: str
    models: dict[str, Repository] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_granted"
    requests: list[str] = field(default_factory=list)
    faults: list[tuple[str, Iterator[Callable[[Handler], None]]]] = field(default_factory=list)

    def disturb(self, pattern: str, answer: Callable[[Handler], None], times: int = 1000) -> None:
        """Answer the next `times` requests whose "METHOD path" matches `pattern` otherwise."""
        self.faults.append((pattern, repeat(answer, times)))

    def asked(self, pattern: str) -> list[str]:
        return [request for request in self.requests if re.search(pattern, request)]


def commit(files: Files) -> str:
    """Forty hex digits of the contents."""
    return blob(repr(sorted(files.items())).encode())


def blob(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def entries(files: Files) -> dict[PurePosixPath, dict[str, Any]]:
    """Files and folders, as the hub describes them."""
    found: dict[PurePosixPath, dict[str, Any]] = {}
    for path, content in files.items():
        file = PurePosixPath(path)
        found[file] = {"path": path, "type": "file", "size": len(content), "oid": blob(content)}
        for folder in filter(lambda each: each.name, file.parents):
            found[folder] = {"path": str(folder), "type": "directory", "oid": blob(str(folder).encode())}
    return found


def status(code: int, message: str = "", **headers: str) -> Callable[[Handler], None]:
    """An error of the hub, in its words."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.reply(code, b"", {"X-Error-Message": message, **named})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub
    sent: bytes

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        request = f"{self.command} {path}"
        self.hub.requests.append(request)
        self.sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        for pattern, answers in self.hub.faults:
            if re.search(pattern, request) and (answer := next(answers, None)) is not None:
                return answer(self)
        if found := REPOSITORY.fullmatch(path):
            self._describe(*found.groups())
        elif found := FILE.fullmatch(path):
            self._serve("datasets" if found[1] else "models", *found.groups()[1:])
        else:
            self.reply(200 if path == "/" else 404)

    do_HEAD = do_GET  # noqa: N815
    do_POST = do_GET  # noqa: N815

    def reply(self, code: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def _error(self, code: int, name: str, message: str) -> None:
        self.reply(code, b"", {"X-Error-Code": name, "X-Error-Message": message})

    def _find(self, kind: str, name: str, revision: str) -> tuple[Repository | None, Files]:
        """A repository and the files of a revision; none where the refusal was sent."""
        repository = getattr(self.hub, kind).get(name)
        if repository is None:
            self._error(401, "RepoNotFound", "Invalid username or password.")
            return None, {}
        return repository, next(
            files for name, files in repository.branches.items() if revision in (name, commit(files))
        )

    def _describe(self, kind: str, name: str, what: str | None, revision: str | None, below: str | None) -> None:
        repository, files = self._find(kind, name, revision or "main")
        if repository is None:
            return
        described: Any
        if what == "tree":
            folder = PurePosixPath((below or "")[1:])
            deep = "recursive=true" in urlsplit(self.path).query.lower()
            parents = {path: path.parents if deep else [path.parent] for path in entries(files)}
            described = [each for path, each in entries(files).items() if folder in parents[path]]
        elif what == "paths-info":
            wanted = {PurePosixPath(path) for path in parse_qs(self.sent.decode())["paths"]}
            described = [each for path, each in entries(files).items() if path in wanted]
        else:
            siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
            described = {"id": name, "sha": commit(files), "gated": repository.gated, "siblings": siblings}
            described |= {"private": False, "downloads": 0, "likes": 0, "tags": []}
        self.reply(200, json.dumps(described).encode(), {"Content-Type": "application/json"})

    def _serve(self, kind: str, name: str, revision: str, path: str) -> None:
        repository, files = self._find(kind, name, revision)
        if repository is None:
            return
        brought = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository.gated and brought != self.hub.token:
            login = "You must have access to it. Please log in."
            ask = f"Visit https://huggingface.co/{name} to ask for access."
            refusal = f"Access to model {name} is restricted. {ask if brought else login}"
            return self._error(403 if brought else 401, "GatedRepo", refusal)
        if path not in files:
            return self._error(404, "EntryNotFound", "Entry not found")
        content = files[path]
        self.reply(200, content, {"X-Repo-Commit": commit(files), "ETag": f'"{blob(content)}"'})


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub without repositories, on a free port, until the block ends. A client opens several connections at once."""
    bound = type("Bound", (Handler,), {})
    server = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 64})(("127.0.0.1", 0), bound)
    bound.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
