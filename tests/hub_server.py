"""A hub on this machine, for tests: what the client asks for, and every way in which a network can go wrong.

It answers as huggingface.co does: the commit of a revision, the tree of a commit in pages, and files, large ones by
way of a redirect to addresses of their own. Faults are put in line and used up by one request for content each.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Sends an answer for the bytes of a file from `start` on.
Fault = Callable[["Handler", bytes, int], None]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    start: int | None
    token: str | None


@dataclass
class Hub:
    """One data set. faults: of requests for content; api_faults: of the others."""

    repo: str
    files: dict[str, bytes]
    address: str = ""
    content_address: str = ""  # another host, which must not see the token
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, COMMIT: COMMIT})
    large: int = 1000  # bytes from which on a file is kept outside of git
    page: int = 1000
    token: str | None = None  # without it 401
    faults: list[Fault] = field(default_factory=list)
    api_faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def contents(self) -> list[Request]:
        """The requests for content; a redirect to it is not one of them."""
        return [request for request in self.requests if request.path.startswith("/content/")]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that gives up
            super().handle()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        given = self.headers.get("Range")
        start = int(given.removeprefix("bytes=").removesuffix("-")) if given else None
        hub, path = self.hub, unquote(parts.path)
        hub.requests.append(Request(self.command, path, start, self.headers.get("Authorization")))
        try:
            if path.startswith("/content/"):
                self.content(hub.files[path.removeprefix("/content/")], start or 0)
            elif hub.api_faults:
                hub.api_faults.pop(0)(self, b"", 0)
            elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, headers={"X-Error-Message": "Invalid username or password."})
            elif path.startswith(f"/datasets/{hub.repo}/resolve/"):
                self.resolve(path.removeprefix(f"/datasets/{hub.repo}/resolve/"))
            elif path == f"/api/datasets/{hub.repo}" or path.startswith(f"/api/datasets/{hub.repo}/"):
                self.api(path.removeprefix(f"/api/datasets/{hub.repo}").strip("/"), parse_qs(parts.query))
            else:
                self.answer(404, headers={"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_GET

    def api(self, path: str, query: Mapping[str, list[str]]) -> None:
        kind, _, revision = (path or "revision/main").partition("/")
        if revision not in self.hub.revisions:
            self.answer(404, headers={"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        elif kind == "revision":
            self.json({"id": self.hub.repo, "sha": self.hub.revisions[revision]})
        else:
            assert kind == "tree"
            entries = [self.entry(name) for name in reversed(self.hub.files)]
            entries.insert(0, {"type": "directory", "oid": "0" * 40, "size": 0, "path": "train"})
            first = int(query.get("cursor", ["0"])[0])
            link = {}
            if first + self.hub.page < len(entries):
                # With the address of the hub itself, as mirrors pass it on.
                following = f"https://huggingface.co{urlsplit(self.path).path}"
                link = {"Link": f'<{following}?recursive=true&cursor={first + self.hub.page}>; rel="next"'}
            assert query["recursive"] == ["true"]
            self.json(entries[first : first + self.hub.page], link)

    def entry(self, name: str) -> dict[str, object]:
        data = self.hub.files[name]
        if len(data) < self.hub.large:
            return {"type": "file", "oid": blob_id(data), "size": len(data), "path": name}
        lfs = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
        pointer = {"type": "file", "oid": blob_id(b"pointer"), "size": len(data), "path": name}
        return {**pointer, "lfs": lfs, "xetHash": sha256(b"xet")}

    def resolve(self, path: str) -> None:
        commit, _, name = path.partition("/")
        assert commit == COMMIT, "a file is fetched at a commit"
        if name not in self.hub.files:
            return self.answer(404, headers={"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        data = self.hub.files[name]
        headers = {"Location": f"{self.hub.content_address}/content/{name}", "X-Repo-Commit": commit}
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256(data)}"'}
        return self.answer(302, headers=headers)

    def content(self, data: bytes, start: int) -> None:
        (self.hub.faults.pop(0) if self.hub.faults else whole)(self, data, start)

    def json(self, value: object, headers: Mapping[str, str] | None = None) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.start(status, {"Content-Length": str(len(body)), **(headers or {})})
        self.send(body)

    def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send(self, body: bytes) -> None:
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def part(self, data: bytes, start: int) -> dict[str, str]:
        """Status line and headers of the content from `start` on; no body."""
        headers = {"Content-Length": str(len(data) - start)}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.start(206 if start else 200, headers)
        return headers

    def hang_up(self) -> None:
        """Closes the connection at once, as a crash does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


def whole(handler: Handler, data: bytes, start: int) -> None:
    handler.part(data, start)
    handler.send(data[start:])


def without_ranges(handler: Handler, data: bytes, start: int) -> None:
    whole(handler, data, 0)


def status(code: int, **headers: str) -> Fault:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, data, start: handler.answer(code, b"an error page", named)


def dropped(n: int) -> Fault:
    """The connection breaks after n bytes."""

    def fault(handler: Handler, data: bytes, start: int) -> None:
        handler.part(data, start)
        handler.send(data[start : start + n])
        time.sleep(0.05)  # a reset would overtake what was just sent
        handler.hang_up()

    return fault


def truncated(n: int) -> Fault:
    """The body ends after n bytes, and nothing says that it should be longer."""

    def fault(handler: Handler, data: bytes, start: int) -> None:
        handler.start(206 if start else 200, {"Connection": "close"})
        handler.send(data[start : start + n])
        handler.close_connection = True

    return fault


def unanswered(handler: Handler, data: bytes, start: int) -> None:
    handler.hang_up()


def stalled(n: int) -> Fault:
    """After n bytes nothing comes any more."""

    def fault(handler: Handler, data: bytes, start: int) -> None:
        handler.part(data, start)
        handler.send(data[start : start + n])
        handler.hub.stopped.wait()

    return fault


def trickling(pause: float) -> Fault:
    """A byte now and then."""

    def fault(handler: Handler, data: bytes, start: int) -> None:
        handler.part(data, start)
        for i in range(start, len(data)):
            handler.send(data[i : i + 1])
            if handler.hub.stopped.wait(pause):
                return

    return fault


def altered(handler: Handler, data: bytes, start: int) -> None:
    """As many bytes as there should be, one of them another."""
    whole(handler, data[:-1] + bytes([data[-1] ^ 1]), start)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    handler = type("HandlerOfHub", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    hub.content_address = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()
