"""Stores that speak the protocols of S3, of Google's store and of the hub, behind a proxy that fails.

S3 is moto's server, and Google's store its emulator. Neither can be the hub: a server here answers the part of its API
that lists and reads a data set.
"""

from __future__ import annotations

import hashlib
import http.client
import http.server
import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

fsspec = pytest.importorskip("fsspec")
STALL = 12.0  # seconds in which a request gets no answer. Clients wait for half of it, long on a loaded machine too


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        pass

    def answer(self, status: int, content: bytes, headers: list[tuple[str, str]], sent: int | None = None) -> None:
        """`sent`: bytes after which the connection is cut."""
        self.send_response(status)
        for name, value in [*headers, ("Connection", "close")]:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])
        self.close_connection = True


@dataclass
class Faults:
    """The proxy's state. Of the first reads of content one gets an error, one is cut, and one gets no answer."""

    port: int  # of the store itself
    on: bool = False
    reads: int = 0
    found: set[str] = field(default_factory=set)

    def next(self) -> str | None:
        if not self.on:
            return None
        self.reads += 1
        kind = {1: "error", 2: "cut", 3: "silence"}.get(self.reads % 4) if self.reads < 4 else None
        self.found |= {kind} if kind else set()
        return kind


def proxy(faults: Faults) -> type[Handler]:
    class Proxy(Handler):
        def handle_any(self) -> None:
            fault = faults.next() if self.command == "GET" and "Range" in self.headers else None
            if fault == "silence":
                time.sleep(STALL)
                self.close_connection = True
                return
            if fault == "error":
                self.answer(503, b"", [("Content-Length", "0")])
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
            body = self._body()
            if body:
                headers["Content-Length"] = str(len(body))
            there = http.client.HTTPConnection("127.0.0.1", faults.port, timeout=60)
            there.request(self.command, self.path, body, headers)
            response = there.getresponse()
            content = response.read()
            skipped = ("transfer-encoding", "connection", "content-length")
            own = [(name, value) for name, value in response.getheaders() if name.lower() not in skipped]
            size = response.getheader("Content-Length") if self.command == "HEAD" else None
            there.close()
            sent = len(content) // 2 if fault == "cut" else None
            self.answer(response.status, content, [*own, ("Content-Length", size or str(len(content)))], sent)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = handle_any

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

    return Proxy


@contextmanager
def serving(handler: type[Handler]) -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that waits no longer
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@dataclass(frozen=True)
class RealStore:
    """A store.

    Attributes:
        url: of the folder in it that the tests use.
        put: writes a file below that folder, by its name.
        writable: whether a client may write by the URL.
    """

    url: str
    put: Callable[[str, bytes], None]
    faults: Faults
    writable: bool = True


@contextmanager
def s3(environment: Any) -> Iterator[RealStore]:
    pytest.importorskip("s3fs", reason="s3fs is not installed, which reads s3://")
    server = pytest.importorskip("moto.server", reason="moto is not installed, which is the S3 of this test")
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    faults = Faults(moto.get_host_and_port()[1])
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        environment.delenv(name)
    for name, value in (keys | {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}).items():
        environment.setenv(name, value)
    # the client's own attempts would hide the faults, and its patience is a minute
    own = {"read_timeout": STALL / 2, "retries": {"max_attempts": 0}}
    environment.setitem(fsspec.config.conf, "s3", {"config_kwargs": own})
    try:
        with serving(proxy(faults)) as port:
            environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            system = fsspec.filesystem("s3")
            environment.setattr(type(system), "retries", 1)
            system.mkdir("bucket")
            yield RealStore("s3://bucket/texts", _put(system, "bucket/texts"), faults)
    finally:
        moto_of_this_process = urllib.request.Request(f"http://127.0.0.1:{faults.port}/moto-api/reset", method="POST")
        urllib.request.urlopen(moto_of_this_process).close()
        moto.stop()


def _put(system: Any, folder: str) -> Callable[[str, bytes], None]:
    return lambda name, data: system.pipe_file(f"{folder}/{name}", data)


@contextmanager
def google(environment: Any) -> Iterator[RealStore]:
    pytest.importorskip("gcsfs", reason="gcsfs is not installed, which reads gs://")
    module = pytest.importorskip("gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed")
    emulator = module.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    emulator.start()
    while emulator._api._httpd is None:
        time.sleep(0.01)
    faults = Faults(emulator._api._httpd.server_address[1])
    try:
        with serving(proxy(faults)) as port:
            environment.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
            system = fsspec.filesystem("gs")
            yield RealStore("gs://bucket/texts", _put(system, "bucket/texts"), faults)
    finally:
        emulator.stop()


class Hub(Handler):
    """The parts of the hub's API that list and read the data set lab/texts."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, entries = unquote(urlsplit(self.path).path), []
        for name, content in sorted(self.files.items()):
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entries.append({"type": "file", "oid": blob, "size": len(content), "path": name})
        if path.startswith("/api/datasets/lab/texts/tree/main"):
            inside = path.removeprefix("/api/datasets/lab/texts/tree/main").strip("/")
            found = [each for each in entries if f"{each['path']}".startswith(inside)]
            self._json(200 if found else 404, found)
        elif path in ("/api/datasets/lab/texts", "/api/datasets/lab/texts/revision/main"):
            self._json(200, {"id": "lab/texts", "sha": "0" * 40, "private": False, "tags": [], "siblings": []})
        elif (name := path.removeprefix("/datasets/lab/texts/resolve/main/")) in self.files:
            self._content(self.files[name])
        else:
            self._json(404, {"error": "Entry not found"}, [("X-Error-Code", "EntryNotFound")])

    def _json(self, status: int, value: object, more: Any = ()) -> None:
        content = json.dumps(value).encode()
        length = ("Content-Length", str(len(content)))
        self.answer(status, content, [("Content-Type", "application/json"), length, *more])

    def _content(self, content: bytes) -> None:
        first, last = self.headers.get("Range", f"bytes=0-{len(content) - 1}").removeprefix("bytes=").split("-")
        part = content[int(first) : int(last) + 1]
        span = ("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.answer(206 if "Range" in self.headers else 200, part, [("Content-Length", str(len(part))), span])


@contextmanager
def hub(environment: Any) -> Iterator[RealStore]:
    constants = pytest.importorskip("huggingface_hub.constants")
    files: dict[str, bytes] = {}
    with serving(type("Files", (Hub,), {"files": files})) as inner:
        faults = Faults(inner)
        with serving(proxy(faults)) as port:
            environment.setattr(constants, "HF_HUB_OFFLINE", False)
            environment.delenv("HF_HUB_OFFLINE", raising=False)
            environment.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
            template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", constants.ENDPOINT)
            environment.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            environment.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")  # of the process that tokenises
            environment.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", STALL / 2)
            put = files.__setitem__
            yield RealStore(
                "hf://datasets/lab/texts/texts", lambda name, data: put(f"texts/{name}", data), faults, writable=False
            )


STORES = {"s3": s3, "gs": google, "hf": hub}


@contextmanager
def opened(name: str, environment: pytest.MonkeyPatch) -> Iterator[RealStore]:
    """A store by the name of its protocol, without what other tests have made its client remember."""
    for variable in ("NO_PROXY", "no_proxy"):  # every server is on this machine
        environment.setenv(variable, "127.0.0.1,localhost")
    with STORES[name](environment) as store:
        fresh = fsspec.get_filesystem_class(name).clear_instance_cache
        try:
            yield store
        finally:
            fresh()
