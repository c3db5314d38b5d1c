"""Rollouts by a server: a stand-in on loopback that speaks the protocol, and answers that are refused."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from megatron.config import ConfigError, resolve
from megatron.config.problems import UserError
from megatron.features.align.check import before_start
from megatron.features.align.sampler import Drawn, Rule
from megatron.features.align.server import Server, read_answer
from megatron.testing.runs import train_on_ranks
from tests.features.align.test_rounds import values


class StandIn:
    """Opens the folders that it is given with transformers, and draws whole texts token by token."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.model: Any = None

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.append((path, body))
        if path == "/update_weights_from_disk":
            from transformers import AutoModelForCausalLM

            self.model = AutoModelForCausalLM.from_pretrained(body["model_path"], dtype=torch.float32).eval()
            return {"success": True}
        return {"choices": [self.choice(n, ids, body) for n, ids in enumerate(body["prompt"])]}

    @torch.no_grad()
    def choice(self, number: int, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        """As vLLM, which has a generator of the request's seed for each of its prompts."""
        draw, ids, logs = torch.Generator().manual_seed(body["seed"]), list[int](), list[float]()
        while len(ids) < body["max_tokens"] and not (ids and ids[-1] in body["stop_token_ids"]):
            scores = self.model(torch.tensor([prompt + ids])).logits[0, -1].log_softmax(-1)
            token = scores.argmax() if body["temperature"] == 0 else torch.multinomial(scores.exp(), 1, generator=draw)
            ids.append(int(token))
            logs.append(float(scores[ids[-1]]))
        return {"index": number, "text": "", "token_ids": ids, "logprobs": {"token_logprobs": logs}}


@contextmanager
def served(answer: Any, key: str | None = None) -> Iterator[str]:
    """A server on loopback. `answer` gets path and body, and returns JSON, or (status, headers, bytes). With a key,
    others are refused, and repeated."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = self.headers.get("Authorization")
            refused = given != (None if key is None else f"Bearer {key}")
            found = (401, {}, str(given).encode()) if refused else answer(self.path, body)
            status, headers, content = found if isinstance(found, tuple) else (200, {}, json.dumps(found).encode())
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def own_values(folder: Any, url: str, **more: Any) -> dict[str, Any]:
    own = values(folder, stop=None, server={"url": url, "type": "sglang"}, texts=6, **more)
    own["model"] |= {"vocab_size": 257, "norm": {"type": "rmsnorm"}}
    own["model"]["mlp"] = {"hidden_size": 64, "activation": "silu", "gated": True}
    own["optimizer"]["lr"] = 5.0
    own["objective"] = {"type": "policy", "options": {"loss": "grpo"}}
    return own


def test_a_server_draws_by_the_weights_of_each_round(tmp_path):
    """The server's log-probabilities of its texts equal the trainer's, so it had the weights of each round. By
    weights of another round they would differ: the last folder that it opened is another model than the first."""
    stand_in = StandIn()
    with served(stand_in.answer) as url:
        records = train_on_ranks(1, own_values(tmp_path, url, evaluate=4))
    steps = [each for each in records if "loss" in each]
    assert len(steps) == 4 and max(each["sampler_difference"] for each in steps) < 1e-4
    assert max(each["grad_norm"] for each in steps) > 0
    folders = [body["model_path"] for path, body in stand_in.asked if path == "/update_weights_from_disk"]
    assert [folder.rpartition("-")[2] for folder in folders] == ["0", "1", "2", "3", "4"]
    requests = [body for path, body in stand_in.asked if path == "/v1/completions"]
    assert {len(each["prompt"]) for each in requests} == {1} and {each["temperature"] for each in requests} == {
        0.0,
        1.0,
    }
    assert len({each["seed"] for each in requests if each["temperature"]}) == 32  # texts of 4 rounds
    groups = [
        list(map(json.loads, path.read_text().splitlines()[1:5])) for path in (tmp_path / "run/rollouts").iterdir()
    ]
    assert all(len({str(text["completion"]) for text in texts}) > 1 for texts in groups)
    rounds = sorted((tmp_path / "run/rollouts").iterdir())
    kept = [each.read_bytes() for each in rounds]
    again = own_values(tmp_path, "http://127.0.0.1:9", evaluate=None)  # without a listener, and no round is drawn again
    again["align"]["server"] = {"url": url, "type": "sglang"}
    again["checkpoint"] = {"resume": "none"}
    with pytest.raises(Exception, match="cannot be asked"):
        train_on_ranks(1, {**again, "training": {**again["training"], "seed": 99}})
    assert len(kept) == 4


def test_a_server_with_other_weights_ends_the_run(tmp_path):
    stand_in = StandIn()

    def stale(path: str, body: dict[str, Any]) -> Any:
        if path == "/update_weights_from_disk" and stand_in.model is not None:
            return {"success": True}
        found = stand_in.answer(path, body)
        if path == "/update_weights_from_disk":
            for parameter in stand_in.model.parameters():
                parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        return found

    with served(stale) as url, pytest.raises(Exception, match="it draws from other weights"):
        train_on_ranks(1, own_values(tmp_path, url, evaluate=None))


RULE = Rule(tokens=4, finished=lambda ids: ids[-1] == 9, vocabulary=50)


def choice(**changes: Any) -> dict[str, Any]:
    found = {"token_ids": [1, 2, 9], "logprobs": {"token_logprobs": [-1.0, -2.0, 0.0]}} | changes
    return {key: value for key, value in found.items() if value is not None}


def logs(*values: Any) -> dict[str, Any]:
    return {"token_logprobs": list(values)}


def test_answers_are_cut_at_their_end():
    found = read_answer({"choices": [choice(token_ids=[1, 9, 3], prompt_token_ids=[5])]}, [5], RULE)
    assert found == Drawn([1, 9], [-1.0, -2.0], True)
    found = read_answer({"choices": [choice(token_ids=[1, 2, 3, 4], logprobs=logs(-1, -1, -1, -1))]}, [5], RULE)
    assert found == Drawn([1, 2, 3, 4], [-1.0] * 4, False)


def test_a_folder_of_weights_that_is_not_the_runs_is_kept(tmp_path):
    """The weights of earlier steps are removed, and nothing else."""
    config: Any = resolve(own_values(tmp_path, "http://127.0.0.1:9"))

    def clear(folder: str, run: str) -> None:
        section = config.align.server.model_copy(update={"weights": str(tmp_path / folder)})
        Server(section, tmp_path / run, None, None, 4, (None, None)).clear()  # type: ignore[arg-type]

    clear("new", "a")
    for name in ("step-3", "checkpoint", "other"):
        (tmp_path / "new" / name).mkdir()
    clear("new", "a")
    assert sorted(each.name for each in (tmp_path / "new").iterdir()) == [".of_run", "other"]
    with pytest.raises(UserError, match="has weights of the run"):
        clear("new", "b")
    (tmp_path / "mine/step-3").mkdir(parents=True)
    with pytest.raises(UserError, match="mine must be empty"):
        clear("mine", "a")
    assert (tmp_path / "mine/step-3").is_dir()


@pytest.mark.parametrize(
    "answer, rule",
    [
        (None, "must have one choice"),
        ([1], "must have one choice"),
        ({"choices": []}, "must have one choice"),
        ({"choices": [choice(), choice()]}, "must have one choice"),
        ({"choices": ["a"]}, "must have token_ids"),
        ({"choices": [choice(token_ids=None)]}, "must have token_ids"),
        ({"choices": [choice(logprobs=[])]}, "must have token_ids"),
        ({"choices": [choice(prompt_token_ids=[6])]}, "must repeat the ids of its prompt"),
        ({"choices": [choice(token_ids=[1, 2])]}, "1 to 4 ids, and a log-probability for each"),
        ({"choices": [choice(token_ids=[], logprobs=logs())]}, "1 to 4 ids"),
        ({"choices": [choice(token_ids=[1] * 5, logprobs=logs(*[-1.0] * 5))]}, "1 to 4 ids"),
        ({"choices": [choice(token_ids=[1, 50, 9])]}, "ids below the tokenizer's 50, not 50"),
        ({"choices": [choice(token_ids=[1, -1, 9])]}, "not -1"),
        ({"choices": [choice(token_ids=[1, "2", 9])]}, "ids below the tokenizer's 50"),
        ({"choices": [choice(logprobs=logs(-1.0, None, 0.0))]}, "finite log-probabilities"),
        ({"choices": [choice(logprobs=logs(-1.0, math.inf, 0.0))]}, "finite log-probabilities"),
        ({"choices": [choice(logprobs=logs(-1.0, 2.0, 0.0))]}, "of at most 0, not 2.0"),
        ({"choices": [choice(logprobs=logs(-1.0, -(10**400), 0.0))]}, "finite log-probabilities"),
        ({"choices": [choice(token_ids=[1, 2, 3])]}, "which is no end of the run's tokenizer"),
    ],
)
def test_other_answers_are_refused(answer, rule):
    with pytest.raises(UserError, match=rule):
        read_answer(answer, [5], RULE)


@pytest.mark.parametrize(
    "answer, rule",
    [
        ((500, {}, b"out of memory"), "status 500: b'out of memory'"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), "status 302"),
        ((200, {}, b"<html>"), "JSON|Expecting"),
        ((200, {}, b"\xff"), "decode"),
        ({"success": False, "message": "no such folder"}, "no such folder"),
    ],
)
def test_what_is_no_answer_is_refused(tmp_path, answer, rule):
    config: Any = resolve(own_values(tmp_path, "http://127.0.0.1:9"))
    with served(lambda path, body: answer) as url:
        section = config.align.server.model_copy(update={"url": url})
        world: Any = None
        with pytest.raises((UserError, ValueError), match=rule):
            Server(section, tmp_path, world, None, 4, (None, None)).ask("/v1/completions", {})


def test_the_key_of_an_environment_variable_is_sent_and_never_shown(tmp_path, monkeypatch):
    config: Any = resolve(own_values(tmp_path, "http://127.0.0.1:9"))
    assert not before_start([], config)
    with served(lambda path, body: {"success": body["well"], "message": "of tok-5a"}, key="tok-5a") as url:
        section = config.align.server.model_copy(update={"url": url, "key_variable": "TEST_SERVER_KEY"})
        world: Any = None
        server = Server(section, tmp_path, world, None, 4, (None, None))
        monkeypatch.setenv("TEST_SERVER_KEY", "tok-5a\n")
        assert server.ask("/v1/completions", {"well": True})["success"]
        with pytest.raises(UserError, match=r"has failed: .*of \*\*\*"):
            server.ask("/v1/completions", {"well": False})
        for wrong, rule in (
            ("tok-77", r"status 401: b'Bearer \*\*\*'"),
            ("two words", "must have a key"),
            ("one\x1b[2Jword", "must have a key"),
            ("it's\\5a", r"status 401: b'Bearer \*\*\*'"),
            ("", "must"),
        ):
            monkeypatch.setenv("TEST_SERVER_KEY", wrong)
            with pytest.raises(UserError, match=rule) as found:
                server.ask("/v1/completions", {})
            assert not wrong or wrong not in str(found.value)
    align = config.align.model_copy(update={"server": section})
    assert "TEST_SERVER_KEY must have a key" in before_start([], config.model_copy(update={"align": align}))[0]
    with pytest.raises(ConfigError, match="not the key itself") as found:
        resolve(values(tmp_path, server={"url": "http://127.0.0.1:9", "key_variable": "tok-5a"}))
    assert "tok-5a" not in str(found.value)


@pytest.mark.parametrize(
    "server, rule",
    [
        ({"url": "file:///etc/passwd"}, "must be an address of http"),
        ({"url": "http://user:word@host"}, "must be an address of http"),
        ({"model": "a"}, "must come with align.server.url"),
    ],
)
def test_mistakes_are_found_before_a_start(tmp_path, server, rule):
    with pytest.raises(ConfigError, match=rule):
        resolve(values(tmp_path, server=server))
