"""Effects of one client on the others, to the log, and to a browser's user."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import ValidationError

from megatron.decoding.endpoint.answer import Answer
from megatron.decoding.endpoint.limits import Limits
from megatron.decoding.endpoint.question import ChatBody, CompletionBody
from tests.decoding.endpoint.test_endpoint import LONGEST, Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Limits(LONGEST, queue=80, patience=1.0), rows=2) as found:
        yield found


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8000", 403),
        ("localhost@evil.example", 403),
        ("[", 403),
        ("", 403),
    ],
)
def test_a_name_that_leads_here_is_refused(served, host, status):
    """A page of a browser whose own name resolves to this machine would be of one origin with the endpoint."""
    assert served.raw("/v1/models", None, {"Host": host})[0] == status


def test_texts_that_wait_are_spared(served, monkeypatch, capfd):
    (before,) = served.complete(prompt="Once", max_tokens=4, seed=1)
    decoder, failed = served.service.decoder, []
    step = decoder.step

    def fails() -> bool:
        if len(decoder.schedule.waiting) == 1 and not failed:
            failed.append(1)
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(decoder, "step", fails)
    long = {"prompt": "x", "max_tokens": 900, "n": 2, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(served.ask, "/v1/completions", long)
        while not served.ask("/health")[1]["running"]:
            pass
        assert served.complete(prompt="Once", max_tokens=4, seed=1) == [before]
        assert other.result()[0] == 500 and failed
    assert served.idle() and "out of memory" in capfd.readouterr().err


def test_news_that_fail_do_not_end_the_thread(served, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        patch.setattr("megatron.decoding.endpoint.service.Text.news", lambda *_: {}["gone"])
        assert served.ask("/v1/completions", {"prompt": "a"})[0] == 500
    assert served.complete(prompt="a", max_tokens=2) and served.idle()
    assert "gone" in capfd.readouterr().err


def test_a_failure_after_the_head_of_a_stream_is_an_event(served, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        patch.setattr(Answer, "piece", lambda *_: {}["gone"])
        (event,) = served.events("/v1/completions", {"prompt": "a", "max_tokens": 900, "ignore_eos": True})
    assert "has failed" in event["error"]["message"] and served.idle()
    assert "gone" in capfd.readouterr().err


def test_bytes_that_are_no_http_are_not_logged(served, capfd):
    for content in (b"GET /\x1b[31m HTTP/1.1\r\n\r\n", b"GET /" + b"a" * 20000, b"\x16\x03\x01\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as link:
            link.sendall(content)
            assert b" 400 " in link.recv(100)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("form", "start", "end"),
    [
        (CompletionBody, '{"prompt": [', "]}"),
        (CompletionBody, '{"prompt": "a", "stop": [', "]}"),
        (ChatBody, '{"messages": [', "]}"),
        (ChatBody, '{"messages": [{"role": "user", "content": [', "]}]}"),
    ],
)
def test_a_body_full_of_mistakes_has_few_errors(form, start, end):
    with pytest.raises(ValidationError) as found:
        form.model_validate_json(start + ",".join(["null"] * 5000) + end)
    assert found.value.error_count() < 6


def test_ids_without_a_text_are_refused(served, monkeypatch):
    """Rows of the embedding above the tokenizer's ids."""
    monkeypatch.setattr(served.endpoint.tokenizer, "size", 200)
    status, found = served.ask("/v1/completions", {"prompt": [220], "echo": True})
    assert status == 400 and "below 200, not 220" in found["error"]["message"]


def test_stop_strings_before_the_fewest_tokens_are_text(served):
    asked = {"prompt": "Once", "seed": 2, "return_token_ids": True, "ignore_eos": True, "max_tokens": 40}
    (free,) = served.complete(**asked)
    ids = free["token_ids"]
    place = next(at for at in range(3, 30) if ids[at] < 128)
    stop, least = chr(ids[place]), place + 4
    end = next((at + 1 for at in range(least - 1, 40) if ids[at] == ids[place]), 40)
    (found,) = served.complete(**asked, stop=stop, min_tokens=least)
    assert found["token_ids"] == ids[:end] and stop in found["text"]
    pieces = served.events("/v1/completions", {**asked, "stop": stop, "min_tokens": least})
    assert "".join(each["choices"][0]["text"] for each in pieces) == found["text"]
    assert json.dumps(found["finish_reason"]) == ('"stop"' if end < 40 else '"length"')
