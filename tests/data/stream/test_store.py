"""Streams from a store: the same tokens as from a folder, over a server that fails, cuts off and changes its files."""

from __future__ import annotations

import http.server
import threading
from collections import Counter
from pathlib import Path

import pytest

from megatron.config.arithmetic.shards import ShardError, describe_shards, has_secret, list_shards
from megatron.config.sections.data import TokenizerSection
from megatron.data.corpus.encode import Treatment
from megatron.data.corpus.inputs import find_inputs
from megatron.data.corpus.job import TokenizeJob, run
from megatron.data.errors import DataError
from megatron.data.stream import work

pytest.importorskip("aiohttp")
fsspec = pytest.importorskip("fsspec")


class Store(http.server.BaseHTTPRequestHandler):
    """Files of a folder, with ranges and tags. Every second request for content fails, and every fourth is cut off."""

    root: Path
    fails = True
    asked: Counter = Counter()

    def log_message(self, *words: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(head=True)

    def do_GET(self, head: bool = False) -> None:
        path = self.root / self.path.lstrip("/")
        if path.is_dir():
            links = "".join(f'<a href="{each.name}{"/" * each.is_dir()}">x</a>' for each in sorted(path.iterdir()))
            return self._answer(200, links.encode(), {"Content-Type": "text/html"}, head)
        if not path.is_file():
            return self._answer(404, b"", {}, head)
        content = path.read_bytes()
        facts = {"ETag": f'"{hash(content)}"', "Accept-Ranges": "bytes"}
        if head:
            return self._answer(200, content, facts, head)
        self.asked["content"] += 1
        if self.fails and self.asked["content"] % 2 == 1:
            return self._answer(503, b"", {}, head)
        if given := self.headers.get("Range"):
            first, last = given.removeprefix("bytes=").split("-")
            part = content[int(first) : int(last or len(content)) + 1]
            facts["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            return self._answer(206, part, facts, head, cut=self.fails and self.asked["content"] % 4 == 2)
        return self._answer(200, content, facts, head)

    def _answer(self, status: int, content: bytes, facts: dict, head: bool, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **facts}.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = True


@pytest.fixture
def server(tmp_path, monkeypatch):
    """(folder, URL) of a store with texts in jsonl, zst and parquet."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet
    import zstandard

    root = tmp_path / "root"
    (root / "texts").mkdir(parents=True)
    lines = "".join(f'{{"text": "text {each} of a line {each * 7919}"}}\n' for each in range(3000))
    (root / "texts" / "a.jsonl").write_text(lines)
    (root / "texts" / "b.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    parquet.write_table(arrow.table({"text": [f"row {each}" for each in range(3000)]}), root / "texts" / "c.parquet")
    handler = type("Handler", (Store,), {"root": root, "asked": Counter()})
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    monkeypatch.setattr("megatron.data.stream.work.WAITS", (0.0,) * 6)
    monkeypatch.setattr("megatron.data.stream.work.BUFFER", 1 << 12)
    fsspec.get_filesystem_class("http").clear_instance_cache()
    yield root / "texts", f"http://127.0.0.1:{serving.server_port}/texts/", handler
    serving.shutdown()
    serving.server_close()


def settings_of(url: str, prefix: Path) -> dict:
    tokenizer = TokenizerSection(type="bytes").model_dump(mode="json")
    shards = describe_shards(list_shards(url)[0])
    return {"stream": url, "shards": shards, "prefix": str(prefix), "tokenizer": tokenizer, "key": "text", "workers": 1}


def test_a_store_that_fails_gives_the_tokens_of_the_folder(server, tmp_path, capsys):
    folder, url, handler = server
    section = TokenizerSection(type="bytes")
    run(TokenizeJob(find_inputs([str(folder)]), tmp_path / "whole", section, Treatment(), version="1"))
    work.tokenise(settings_of(url, tmp_path / "part"))
    for ending in (".bin", ".idx", ".origin"):
        assert (tmp_path / f"part{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()
    shown = capsys.readouterr().err
    assert shown.count("Next attempt in") >= 3 and "503" in shown


def test_a_store_that_stays_away_is_an_error_that_keeps_the_work(server, tmp_path):
    folder, url, handler = server
    settings = settings_of(url, tmp_path / "part")
    handler.do_GET = lambda self, head=False: self._answer(503, b"", {}, head)
    with pytest.raises(DataError, match=r"has failed 7 times in a row|must be listed"):
        work.tokenise(settings)
    fsspec.get_filesystem_class("http").clear_instance_cache()
    with pytest.raises(ShardError, match="must be listed"):
        list_shards(url)


def test_a_file_of_a_store_that_goes_is_named(server, tmp_path):
    folder, url, handler = server
    handler.fails = False
    opened = work.ShardInput.of(list_shards(url)[0][0]).open()
    (folder / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"a\.jsonl: this shard has changed .* it is no longer there"):
        opened.read(1)


def test_errors_of_a_store_show_no_secret(monkeypatch, capsys):
    monkeypatch.setattr("megatron.data.stream.work.WAITS", (0.0,))

    def fail() -> None:
        raise RuntimeError("403 for url: https://me:pass@cdn.example/a?X-Signature=hidden&b=c, message='no'")

    with pytest.raises(DataError) as caught:
        work.patiently(fail, "hf://datasets/a/b")
    shown = str(caught.value) + str(caught.value.__cause__) + capsys.readouterr().err
    assert "hidden" not in shown and "pass" not in shown and shown.count("https://cdn.example/a?...") == 3
    for url in ("s3://key:word@bucket/a", "https://a.example/b?x=1&X-Amz-Signature=c", "https://a.example/b?token=c"):
        assert has_secret(url)
    for url in ("s3://bucket/key=1/a", "http://host:80/a@b", "hf://datasets/a/b@main/c", "data/a?token=b"):
        assert not has_secret(url)


def test_a_file_of_a_store_that_changes_is_an_error(server, tmp_path):
    folder, url, handler = server
    handler.fails = False
    settings = settings_of(url, tmp_path / "part")
    shards = [work.ShardInput.of(shard) for shard in list_shards(url)[0]]
    (folder / "b.jsonl.zst").write_bytes((folder / "b.jsonl.zst").read_bytes()[::-1])
    with pytest.raises(DataError, match=r"b\.jsonl\.zst: this shard has changed"):
        run(work.job_of(settings, shards))
    assert not list(tmp_path.glob("part*"))
