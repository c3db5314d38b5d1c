"""`deepy serve` in a process of its own, and a run of reinforcement learning whose texts it draws."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from megatron.testing.runs import train_on_ranks
from tests.features.align.test_server import own_values
from tests.paths import ROOT


def ask(url: str, path: str, body: Any) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


@pytest.mark.tour
@pytest.mark.limit(300)
def test_a_run_draws_from_the_endpoint(tmp_path):
    """The trainer's log-probabilities of the texts equal the endpoint's, with the weights of each round."""
    first = own_values(tmp_path / "first", "http://127.0.0.1:9", evaluate=None)
    first["align"].pop("server")
    first["training"]["steps"] = 1
    train_on_ranks(1, first)
    weights = tmp_path / "weights"
    weights.mkdir()
    words = [str(tmp_path / "first/run/config.yml"), "--port", "0", "--name", "policy", "--weights", str(weights)]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools/serve.py"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.stderr and process.stderr.read()
        own = own_values(tmp_path / "second", url, evaluate=None)
        own["align"]["server"]["weights"] = str(weights / "of_run")
        own["training"] |= {"steps": 2, "seed": 7}
        records = train_on_ranks(1, own)
        steps = [each for each in records if "loss" in each]
        assert len(steps) == 2 and max(each["sampler_difference"] for each in steps) < 1e-5
        assert ask(url, "/v1/completions", {"prompt": "1+1=", "max_tokens": 3})["model"] == "policy"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            ask(url, "/update_weights_from_disk", {"model_path": str(tmp_path)})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(url, "/update_weights_from_disk", {"model_path": str(weights)})
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["nowhere"], "nowhere"),
        (["runs", "--host", "0.0.0.0"], "--key must be given with an address that others can reach"),
        (["runs", "--longest", "1"], "--longest must be at least 2"),
    ],
)
def test_mistakes_are_found_before_the_model_is_read(words, rule, capsys, tmp_path, monkeypatch):
    from tools.serve import main

    monkeypatch.chdir(tmp_path)
    try:
        status: Any = main(words)
    except SystemExit as error:
        status = error.code
    assert status == 2 and rule in capsys.readouterr().err


@pytest.mark.parametrize(("name", "status"), [("a\0b", 400), ("\ud800", 400), ("..", 403), ("/", 403)])
def test_names_of_weights_that_are_none(name, status, tmp_path):
    from megatron.decoding.endpoint.limits import Refusal
    from tools.serve import loader

    load: Any = loader
    with pytest.raises(Refusal) as found:
        load(tmp_path, None, 16, "cpu")(name if name[0] != "." else str(tmp_path / name))
    assert found.value.status == status
