"""Tokenizers from the hub: an offline machine gets an error at once, an online one (here a server of our own)
fetches."""

from __future__ import annotations

import http.server
import socket
import threading
import time

import pytest

from megatron.checkpoint import CheckpointError
from megatron.checkpoint.hf.importer import locate
from megatron.config.sections.data import TokenizerSection
from megatron.data.errors import DataError
from megatron.data.tokenizer import build_tokenizer, unreachable


@pytest.fixture
def cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    def use(endpoint: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )

    return use


@pytest.fixture
def server(tmp_path):
    """The hub's answers for one file of any repository."""
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    content, commit = backend.to_str().encode(), "0" * 40

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200 if self.path.endswith("/tokenizer.json") else 404)
            self.send_header("ETag", f'"{commit}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def closed():
    """A port without a listener, which no other process can take."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_online_then_from_the_cache_then_offline_without_it(cache, server, closed, monkeypatch):
    cache(server)
    section = TokenizerSection(path="lab/words")
    assert build_tokenizer(section).size == 2
    cache(closed)
    assert build_tokenizer(section).size == 2  # fetched before
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it is tried again"))
    with pytest.raises(DataError, match="cannot be reached") as caught:
        build_tokenizer(TokenizerSection(path="lab/others"))
    assert "local cache" in str(caught.value)
    with pytest.raises(CheckpointError, match="not in the hub's local cache, and 127.0.0.1 cannot be reached"):
        locate("lab/model")


def test_what_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    monkeypatch.setattr(socket, "create_connection", lambda *_: threading.Event().wait())
    assert "does not answer within 0.2 seconds" in unreachable("https://hub.example")


def test_a_proxy_is_asked_in_place_of_the_hub(cache, server, closed, monkeypatch):
    monkeypatch.setenv("https_proxy", server)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert unreachable("https://hub.example") is None
    monkeypatch.setenv("https_proxy", closed)
    assert "cannot be reached" in unreachable("https://hub.example")
