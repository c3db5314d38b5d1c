"""The endpoint over real sockets: answers against whole texts, refusals, and clients that misbehave."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from megatron.config import resolve
from megatron.data.chat.encode import PLAIN, ChatTemplate
from megatron.data.tokenizer import BytesTokenizer
from megatron.decoding.decoder import Decoder, WholeModel
from megatron.decoding.endpoint.app import Endpoint, listening
from megatron.decoding.endpoint.limits import Limits
from megatron.decoding.endpoint.question import Reader
from megatron.decoding.endpoint.service import Service
from megatron.model.stack import Model, build_model

TOKENIZER = BytesTokenizer()
TEMPLATE = ChatTemplate("plain", PLAIN, {"eos_token": "<|endoftext|>"})
LONGEST = 1024


def head(path: str, size: object) -> bytes:
    lines = f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {size}"
    return "\r\n".join([*lines, "", ""]).encode()


class Served:
    """An endpoint in a thread of its own."""

    def __init__(self, model: Model, limits: Limits, rows: int = 6, **how: Any) -> None:
        self.model, self.limits, self.rows, self.how = model, limits, rows, how
        self.ready, self.port = threading.Event(), 0
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()))
        self.thread.start()
        assert self.ready.wait(20)

    async def run(self) -> None:
        self.loop, self.ended = asyncio.get_running_loop(), asyncio.Event()
        pages = self.rows * LONGEST // 32
        decoder = Decoder(WholeModel(self.model), "cpu", rows=self.rows, vocabulary=TOKENIZER.size, pages=pages)
        self.service = Service(decoder, self.loop.call_soon_threadsafe)
        reader = Reader(self.model.plan.config.model, TOKENIZER, ["tiny"], TEMPLATE, self.limits)
        self.endpoint = Endpoint(self.service, reader, TOKENIZER, self.limits, **self.how)
        async with listening(self.endpoint, "127.0.0.1", 0) as self.port:
            self.ready.set()
            await self.ended.wait()
        self.service.close()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join(20)
        assert not self.thread.is_alive()

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        status, content = self.raw(path, body, headers)
        return status, json.loads(content)

    def raw(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            sent = {"Content-Type": "application/json", **(headers or {})}
            link.request("GET" if data is None else "POST", path, data, sent)
            answer = link.getresponse()
            return answer.status, answer.read()
        finally:
            link.close()

    def complete(self, **body: Any) -> list[dict[str, Any]]:
        status, found = self.ask("/v1/completions", body)
        assert status == 200, found
        return found["choices"]

    def events(self, path: str, body: Any) -> list[Any]:
        status, content = self.raw(path, {**body, "stream": True})
        lines = [line.removeprefix("data: ") for line in content.decode().split("\n\n") if line]
        assert status == 200 and lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def open(self, body: Any, path: str = "/v1/completions", window: int | None = None) -> socket.socket:
        """A connection on which a request was sent."""
        link = socket.socket()
        if window is not None:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        link.settimeout(20)
        link.connect(("127.0.0.1", self.port))
        data = json.dumps(body).encode()
        link.sendall(head(path, len(data)) + data)
        return link

    def idle(self) -> bool:
        """Whether all pages are free within some seconds."""
        for _ in range(200):
            status, state = self.ask("/health")  # 503 while the server still has closed connections
            if status == 200 and (state["running"], state["waiting"], state["pages_in_use"]) == (0, 0, 0):
                return True
            time.sleep(0.05)
        return False


def a_model() -> Model:
    attention = {"heads": 4, "kv_heads": 2}
    plain = {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 257, "norm": {"type": "rmsnorm"}}
    config = resolve({"model": {**plain, "attention": attention}, "training": {"steps": 1, "sequence_length": 128}})
    model, draw = build_model(config, dtype=torch.float64).eval(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return model


@contextmanager
def serving(limits: Limits, **how: Any) -> Iterator[Served]:
    found = Served(a_model(), limits, **how)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Limits(LONGEST, queue=80, body=1 << 16, patience=1.0)) as found:
        yield found


def logs_of(model: Model, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(torch.tensor([text]))[0].log_softmax(-1)


def test_ids_and_log_probabilities_are_those_of_whole_texts(served):
    """Many clients at once, each against the model's own logits of its text."""
    draw = random.Random(1)
    prompts = [[draw.randrange(257) for _ in range(draw.randrange(1, 70))] for _ in range(12)]

    def ask(number: int) -> list[dict[str, Any]]:
        own = {"prompt": prompts[number], "max_tokens": 5 + number, "seed": number, "ignore_eos": True}
        more = {"temperature": number % 3 / 2, "echo": number % 2 == 0, "logprobs": 3, "return_token_ids": True}
        return served.complete(**own, **more)

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(12)))
    assert [ask(number) for number in (3, 6)] == [together[3], together[6]]
    for number, (choice,) in enumerate(together):
        text = prompts[number] + choice["token_ids"]
        begin = 1 if number % 2 == 0 else len(prompts[number])
        logs = logs_of(served.model, text)
        wanted = [float(logs[place - 1, text[place]]) for place in range(begin, len(text))]
        given = choice["logprobs"]["token_logprobs"]
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 5 + number
        if number % 2 == 0:
            assert given[0] is None and choice["text"].startswith(TOKENIZER.decode(prompts[number]))
            given = given[1:]
        assert given == pytest.approx(wanted, abs=1e-9)
        last = logs[len(text) - 2].topk(3)
        names = {TOKENIZER.token(int(each)): float(log) for log, each in zip(*last)}
        if len(names) == 3:
            assert choice["logprobs"]["top_logprobs"][-1] == pytest.approx(names, abs=1e-9)
        if number % 3 == 0:
            assert choice["token_ids"] == logs[len(prompts[number]) - 1 : -1].argmax(-1).tolist()


def test_choices_and_prompts_have_their_places(served):
    prompts = ["Once", "upon a time", "Once"]
    asked = {"prompt": prompts, "n": 2, "max_tokens": 6, "seed": 4, "return_token_ids": True}
    found = served.complete(**asked)
    assert [each["index"] for each in found] == list(range(6))
    assert [bytes(each["prompt_token_ids"]).decode() for each in found] == [each for each in prompts for _ in range(2)]
    assert len({tuple(each["token_ids"]) for each in found}) > 3, "each text has draws of its own"
    assert found == served.complete(**asked)
    status, whole = served.ask("/v1/completions", asked)
    count = sum(len(each["token_ids"]) for each in found)
    assert status == 200 and whole["usage"] == {
        "prompt_tokens": 19,
        "completion_tokens": count,
        "total_tokens": 19 + count,
    }


def test_a_stream_has_the_pieces_of_the_answer(served):
    asked = {"prompt": "Once", "n": 2, "max_tokens": 30, "seed": 1, "temperature": 1.5, "logprobs": 1}
    whole = served.complete(**asked)
    events = served.events("/v1/completions", {**asked, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == [] and events[-1]["usage"]["prompt_tokens"] == 4 and len(events) > 10
    for each in whole:
        own = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == each["index"]]
        assert "".join(piece["text"] for piece in own) == each["text"]
        logs = [log for piece in own for log in piece["logprobs"]["token_logprobs"]]
        assert logs == each["logprobs"]["token_logprobs"]
        assert [piece["finish_reason"] for piece in own[-2:]] == [None, each["finish_reason"]]


def test_chats_continue_the_template(served):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "é"},
    ]
    asked = {"messages": messages, "max_tokens": 12, "seed": 5, "logprobs": True, "top_logprobs": 2}
    status, found = served.ask("/v1/chat/completions", asked)
    prompt = "User: Hi you\nAssistant: Yes?<|endoftext|>\nUser: é\nAssistant:"
    (same,) = served.complete(prompt=prompt, max_tokens=12, seed=5, stop="<|endoftext|>")
    (choice,) = found["choices"]
    assert status == 200 and choice["message"] == {"role": "assistant", "content": same["text"]}
    first = choice["logprobs"]["content"][0]
    assert len(first["top_logprobs"]) == 2 and first["logprob"] <= first["top_logprobs"][0]["logprob"] <= 0
    events = served.events("/v1/chat/completions", asked)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == same["text"]


def test_texts_end_where_they_are_asked_to(served):
    asked = {"prompt": "Once", "max_tokens": 40, "seed": 2, "temperature": 1.0, "return_token_ids": True}
    (free,) = served.complete(**asked, ignore_eos=True)
    ids, text = free["token_ids"], free["text"]
    stop = next(text[at : at + 2] for at in range(5, 30) if "\ufffd" not in text[at : at + 2])
    (cut,) = served.complete(**asked, ignore_eos=True, stop=[stop, "never there"])
    assert cut["text"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"
    (kept,) = served.complete(**asked, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert kept["text"] == cut["text"] + stop
    (by_id,) = served.complete(**asked, ignore_eos=True, stop_token_ids=[ids[9]])
    assert by_id["token_ids"] == ids[: ids.index(ids[9]) + 1] and by_id["finish_reason"] == "stop"
    greedy = {**asked, "temperature": 0}
    (plain,) = served.complete(**greedy, ignore_eos=True)
    stops, least = plain["token_ids"][:3], 9  # they are not chosen before
    (late,) = served.complete(**greedy, ignore_eos=True, stop_token_ids=[*stops, 1 << 30], min_tokens=least)
    found = late["token_ids"]
    assert len(found) >= least and not {*found[: least - 1]} & {*stops}
    assert [at for at, token in enumerate(found) if token in stops and at >= least - 1] in ([], [len(found) - 1])
    status, refused = served.ask("/v1/completions", {**asked, "min_tokens": 1, "stop_token_ids": [*range(256)]})
    assert status == 400 and refused["error"]["param"] == "stop_token_ids"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", b"{", 400, "JSON"),
        ("completions", b"\xff\xfe", 400, "JSON"),
        ("completions", b'{"prompt": "\xff"}', 400, "JSON"),
        ("completions", b'{"prompt": "\\ud800"}', 400, "JSON"),
        ("completions", b"[" * 20000, 400, "JSON"),
        ("completions", b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}", 400, "JSON"),
        ("completions", b'{"prompt": "a", "max_tokens": 1' + b"0" * 9000 + b"}", 400, "out of range"),
        ("completions", b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        ("completions", b" " * (1 << 17), 413, "too|Too"),
        ("completions", [1], 400, "the body"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": ""}, 400, "must have a token"),
        ("completions", {"prompt": []}, 400, "1 to 256 texts"),
        ("completions", {"prompt": [[]]}, 400, "must have a token"),
        ("completions", {"prompt": [257]}, 400, "below 257, not 257"),
        ("completions", {"prompt": [-1]}, 400, "prompt: it must be a text, a list of ids"),
        ("completions", {"prompt": [[1], "a"]}, 400, "prompt"),
        ("completions", {"prompt": ["a"] * 200, "n": 2}, 400, "1 to 256 texts"),
        ("completions", {"prompt": "a" * 1100}, 400, "at most 1024"),
        ("completions", {"prompt": "a", "max_tokens": 1024}, 400, "1025 tokens"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "at least 1"),
        ("completions", {"prompt": "a", "max_tokens": "3"}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "n": 65}, 400, "n: "),
        ("completions", {"prompt": "a", "n": True}, 400, "n: "),
        ("completions", {"prompt": "a", "stop": ["a"] * 17}, 400, "stop"),
        ("completions", {"prompt": "a", "stop": ""}, 400, "stop: it must be a text of 1 to 256"),
        ("completions", {"prompt": "a", "stop": "a" * 257}, 400, "stop"),
        ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        ("completions", {"prompt": "a", "top_p": 1.1}, 400, "top_p"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty: this endpoint does not"),
        ("completions", {"prompt": "a", "model": "gpt\u202e"}, 404, "must be one of tiny"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "king", "content": "a"}]}, 400, "must be one of system"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 1100}]}, 400, "at most 1024"),
        ("nothing", {}, 404, "Not Found"),
    ],
)
def test_refusals(served, path, body, status, words):
    found, answer = served.ask(f"/v1/{path}", body)
    assert found == status and set(answer["error"]) == {"message", "type", "param", "code"}
    assert re.search(words, answer["error"]["message"]), answer
    assert len(answer["error"]["message"]) < 700


def test_neutral_options_are_taken(served):
    plain = {"prompt": "a", "max_tokens": 2, "seed": 1}
    more = {"presence_penalty": 0, "logit_bias": {}, "best_of": 1, "suffix": None, "user": "me", "model": "tiny"}
    assert served.complete(**plain, **more) == served.complete(**plain)


def test_models_health_and_headers(served):
    assert served.ask("/v1/models")[1]["data"][0]["id"] == "tiny" and served.ask("/v1/models/tiny")[0] == 200
    assert served.ask("/v1/models/other")[0] == 404 and served.ask("/health")[1]["status"] == "ok"
    assert served.ask("/v1/completions")[0] == 405
    assert served.ask("/v1/completions", {}, {"Content-Type": "text/plain"})[0] == 415
    assert served.ask("/v1/completions", {}, {"Content-Encoding": "gzip"})[0] == 415


def test_clients_that_go_away_free_their_pages(served):
    """Streams and whole answers, running and waiting. None would end soon."""
    long = {"prompt": "x" * 100, "max_tokens": 900, "n": 2, "ignore_eos": True}
    links = [served.open({**long, "stream": stream}) for stream in (True, False)]
    assert links[0].recv(15) == b"HTTP/1.1 200 OK"
    assert served.complete(prompt="Once", max_tokens=1), "they are answered at the same time"
    links.append(served.open({**long, "n": 9}))
    while not served.ask("/health")[1]["waiting"]:
        time.sleep(0.01)
    for each in links:
        each.close()
    assert served.idle()


def test_a_slow_reader_is_left(served):
    """Log-probabilities of a long prompt are more than the buffers of a connection take."""
    asked = {"prompt": "x" * 900, "echo": True, "logprobs": 20, "n": 40, "max_tokens": 2, "stream": True}
    link = served.open(asked, window=4096)
    assert link.recv(15) == b"HTTP/1.1 200 OK"
    assert served.complete(prompt="Once", max_tokens=2)
    assert served.idle(), "its pages are free, though it is still connected"
    time.sleep(3 * served.limits.patience)
    read = b""
    with suppress(ConnectionError):
        while piece := link.recv(1 << 20):
            read += piece
    assert b"[DONE]" not in read
    link.close()


def test_a_slow_sender_is_refused(served):
    link = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    link.sendall(head("/v1/completions", 9) + b"{")
    assert link.recv(12) == b"HTTP/1.1 408"
    link.close()
    silent = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    assert silent.recv(1) == b"", "a connection without a request is closed"
    silent.close()


def test_a_flood_is_refused_and_the_others_are_answered(served):
    def ask(_: int) -> int:
        return served.raw("/v1/completions", {"prompt": "x", "n": 16, "max_tokens": 8})[0]

    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(ask, range(48)))
    assert set(statuses) == {200, 429} and statuses.count(200) >= 5
    assert served.idle() and served.complete(prompt="Once", max_tokens=1)


def test_after_nonsense_the_answers_are_the_same(served):
    """Seeded mutations of good requests, in the bytes of JSON and of HTTP."""
    asked = {"prompt": "Once upon", "max_tokens": 8, "seed": 9, "logprobs": 2, "echo": True}
    before, draw = served.complete(**asked), random.Random(38)
    keys = ["prompt", "max_tokens", "n", "stop", "logprobs", "temperature", "top_p", "stream", "messages", "seed", "\0"]
    values: list[Any] = [None, True, -1, 0, 3, 1e308, "", "\0\x1b[2J", "a", [], {}, [[]], [0], [[3], [4]], ["b", "c"]]
    for _ in range(120):
        body = {**asked, **{draw.choice(keys): draw.choice(values) for _ in range(draw.randrange(4))}}
        data = bytearray(json.dumps(body).encode())
        if draw.random() < 0.5:
            for _ in range(draw.randrange(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
        path = draw.choice(["/v1/completions", "/v1/chat/completions", "/v1/\0", "/v1/models"])
        if draw.random() < 0.7:
            status, content = served.raw(path.replace("\0", "%00"), bytes(data))
            assert status in (200, 400, 404, 405), content
            assert status == 200 or set(json.loads(content)) == {"error"}
            continue
        size = draw.choice([len(data), len(data) + 5, 3, -1, 10**30, "x"])
        raw = bytearray(head(path, size) + bytes(data))
        raw[draw.randrange(len(raw))] = draw.randrange(256)
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as link:
            link.sendall(raw[: draw.randrange(len(raw))] if draw.random() < 0.3 else raw)
            link.shutdown(socket.SHUT_WR)
            try:
                while link.recv(65536):
                    pass
            except ConnectionError:
                pass
    assert served.idle() and served.complete(**asked) == before


def test_a_pass_that_fails_ends_its_texts_only(served, monkeypatch, capfd):
    (before,) = served.complete(prompt="Once", max_tokens=4, seed=1)
    step, calls = served.service.decoder.step, []

    def fails() -> bool:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(served.service.decoder, "step", fails)
    status, found = served.ask("/v1/completions", {"prompt": "Once", "max_tokens": 20, "ignore_eos": True})
    assert status == 500 and "RuntimeError" in found["error"]["message"]
    assert served.complete(prompt="Once", max_tokens=4, seed=1) == [before] and served.idle()
    assert "out of memory" in capfd.readouterr().err


def test_numbers_that_are_not_finite_are_an_error():
    with serving(Limits(LONGEST)) as served:
        with torch.no_grad():
            served.model.embedding.tokens.weight[7] = float("nan")
        status, found = served.ask("/v1/completions", {"prompt": [7, 8]})
        assert status == 500 and "no finite numbers" in found["error"]["message"]
        assert served.complete(prompt=[8], max_tokens=2, temperature=0)  # a drawn token may be 7, which is then read


def test_keys_connections_and_time():
    with serving(Limits(LONGEST, connections=3, seconds=0.5, patience=5), key="secret") as served:
        own = {"Authorization": "Bearer secret"}
        assert served.ask("/v1/models")[0] == 401 and served.ask("/v1/models", None, own)[0] == 200
        assert served.ask("/v1/models", None, {"Authorization": "Bearer s\xe9cret"})[0] == 401
        long = {"prompt": "x", "max_tokens": 1000, "n": 6, "ignore_eos": True}
        status, found = served.ask("/v1/completions", long, own)
        assert status == 504 and found["error"]["code"] == "timeout"
        status, content = served.raw("/v1/completions", {**long, "stream": True}, own)
        assert status == 200 and content.rstrip().endswith(b"[DONE]") and b'"code": "timeout"' in content
        assert served.idle()
        held = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(3)]
        for _ in range(100):
            status, _ = served.ask("/health")
            if status == 503:
                break
        assert status == 503
        for each in held:
            each.close()
        assert served.idle()
