"""Whole runs of peers on gloo: layouts that meet, resumes, and a killed peer whose run is replayed from its ledger."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron.testing import train_on_ranks
from tests.features.peers.companies import VALUES, Company, act, tensors


def lines(shared: Path) -> list[dict]:
    return [json.loads(each.read_text())["signed"] for each in sorted((shared / "rounds").iterdir())]


def wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_peers_of_different_layouts_are_one_data_parallel_run(tmp_path):
    """H = 1, SGD inside, an outer rate of 1: the peers' mean weights are a step on the mean gradient."""
    sgd = {"optimizer": {"type": "sgd", "lr": 0.5, "momentum": 0.0, "gradient_clipping": 0.0}}
    layouts = {"b": ["parallel.tensor=2", "parallel.sequence=true"], "c": ["zero.stage=3"]}
    keys = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    with Company(tmp_path, {"a": 1, "b": 2, "c": 2}, **keys) as company:
        company.run("peers", "training.steps=4", own=layouts, **sgd)
        found = [company.tensors("peers", name, 4) for name in company.peers]
    whole = {**VALUES, **sgd, "run": {"dir": str(tmp_path / "plain")}}
    train_on_ranks(1, whole, ["training.steps=4", "training.global_batch_size=6"])
    plain = tensors(tmp_path / "plain", 4)
    masters = [key for key in plain if key[1] == "master"]
    assert masters
    for key in masters:
        outer = (f"{key[0]}.outer_weights", "outer_weights")
        for each in found:
            assert torch.equal(each[key], found[0][key]) and torch.equal(each[outer], each[key])
        # Four steps that round differently, of weights below 1.
        torch.testing.assert_close(found[0][key], plain[key], rtol=0, atol=4e-6)


@pytest.mark.tour
@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": "streaming_diloco", "every": 4, "fragments": 2, "delay": 1, "alpha": 0.5},
        {"algorithm": "sparseloco", "every": 2},
    ],
    ids=lambda keys: keys["algorithm"],
)
def test_a_resumed_company_continues_bitwise(tmp_path, keys):
    with Company(tmp_path, {"a": 1, "b": 1}, **keys) as company:
        company.run("whole")
        company.run("parts", "training.stop_at_step=3")
        company.run("parts")
        for name in company.peers:
            assert same(company.tensors("whole", name, 8), company.tensors("parts", name, 8)), name
        one, other = (company.tensors("whole", name, 8) for name in company.peers)
        assert all(torch.equal(one[key], other[key]) for key in one if key[1] == "outer_weights")
    assert [each["members"] for each in lines(tmp_path / "whole/shared")] == [
        each["members"] for each in lines(tmp_path / "parts/shared")
    ]


@pytest.mark.tour
def test_decoupled_peers_on_other_layouts_and_their_replay(tmp_path):
    """One peer has pipeline stages. The replay has the bits of the common weights."""
    keys = {"every": 4, "fragments": 2, "delay": 1, "alpha": 0.5, "quorum": 1, "algorithm": "decoupled"}
    layouts = {"b": ["parallel.pipeline=2"]}
    with Company(tmp_path, {"a": 1, "b": 2}, **keys) as company:
        company.run("run", own=layouts)
        company.run("replay", own=layouts, peers={"replay": str(tmp_path / "run/shared")})
        found = [company.tensors(run, name, 8) for run in ("run", "replay") for name in company.peers]
    common = [key for key in found[0] if key[1] in ("master", "outer_weights", "outer_velocity")]
    assert len(common) > 20 and {each["peer"] for line in lines(tmp_path / "run/shared") for each in line["members"]}
    for key in common:
        assert all(torch.equal(each[key], found[0][key]) for each in found), key


@pytest.mark.tour
def test_a_killed_peer_returns_and_the_ledger_repeats_the_run(tmp_path):
    """b dies in round 2. a continues without it. b returns from its checkpoint of step 3 (in round 1) and repeats the
    rest of that round. Then it skips to round 4, and contributes again. The replay has the same ledger without a
    fault."""
    shared = tmp_path / "faulty/shared"
    steps, save = "training.steps=12", "checkpoint.every=3"
    with Company(tmp_path, {"a": 1, "b": 1}, every=2, algorithm="sparseloco", state_every=2) as company:
        with ThreadPoolExecutor(2) as threads:
            hold = [act(step=9, wait=str(shared / "announced/00000004/b"))]
            hasty = {"timeout": 3.0}
            a = threads.submit(company.peer, "a", "faulty", steps, save, hooks=hold, peers=hasty)
            with pytest.raises(RuntimeError, match="rank 0 died"):
                company.peer("b", "faulty", steps, save, hooks=[act(step=5, kill=True)])
            wait_for(shared / "rounds/00000003.json")
            wait_for(shared / "states/00000003")
            (shared / "contributions/00000002/a").unlink()  # so that b takes a state of the folder
            company.peer("b", "faulty", steps, save)
            a.result()
        assert [[each["peer"] for each in line["members"]] for line in lines(shared)] == [
            ["a", "b"], ["a", "b"], ["a"], ["a"], ["a", "b"], ["a", "b"],
        ]  # fmt: skip
        assert lines(shared)[2]["absent"] == {"b": "silent"} and lines(shared)[4]["members"][1]["jumps"] == [[4, 4]]
        company.run("replay", steps, save, peers={"replay": str(shared)})
        for name in company.peers:
            assert same(company.tensors("faulty", name, 12), company.tensors("replay", name, 12)), name
    keys = ("members", "absent", "strikes", "base")
    assert [[line[key] for key in keys] for line in lines(shared)] == [
        [line[key] for key in keys] for line in lines(tmp_path / "replay/shared")
    ]


HASTY = {"timeout": 1.0, "patience": 2.0}


def common(company: Company, run: str, step: int) -> None:
    """All peers hold the same common weights after a step, and train from them."""
    found = [company.tensors(run, name, step) for name in company.peers]
    outer = [key for key in found[0] if key[1] == "outer_weights"]
    for name, state in outer:
        master = (name.removesuffix(".outer_weights"), "master")
        assert all(torch.equal(each[name, state], found[0][name, state]) for each in found)
        assert all(torch.equal(each[master], each[name, state]) for each in found)


@pytest.mark.tour
def test_a_last_round_that_was_not_decided_stays_open(tmp_path):
    with Company(tmp_path, {"a": 1, "b": 1}, every=2, quorum=2) as company:
        company.peer("a", "run", "training.steps=2", peers=HASTY)
        ledger = (tmp_path / "run/a/ledger.jsonl").read_text()
        assert '"event": "stop"' in ledger and '"event": "end"' not in ledger and "1 of 2 contributions" in ledger
        company.run("run", "training.steps=2")
        assert '"event": "end"' in (tmp_path / "run/a/ledger.jsonl").read_text()
        common(company, "run", 2)


@pytest.mark.tour
def test_a_peer_whose_round_was_deleted_takes_a_state(tmp_path):
    """b stops in the open round 1, whose contributions are gone when it returns."""
    shared = tmp_path / "run/shared"
    with Company(tmp_path, {"a": 1, "b": 1}, every=2, quorum=2, state_every=2) as company:
        company.run("run", "training.stop_at_step=3")
        company.peer("b", "run", peers=HASTY)
        company.peer("a", "run", peers=HASTY)
        assert (shared / "states/00000001").exists()
        for name in company.peers:
            (shared / "contributions/00000001" / name).unlink()
        company.run("run")
        common(company, "run", 8)
    assert [each["members"][1]["jumps"] for each in lines(shared)][2] == [[4, 2]]


@pytest.mark.tour
def test_a_peer_that_returns_after_the_end_saves_the_last_weights(tmp_path):
    with Company(tmp_path, {"a": 1, "b": 1}, every=2) as company:
        company.run("run", "training.stop_at_step=3")
        company.peer("a", "run", peers={"timeout": 1.0})
        company.peer("b", "run")
        common(company, "run", 8)


def test_the_noise_scale_of_a_later_share(tmp_path):
    """The first samples of b's batch are not the first ones of all peers."""
    with Company(tmp_path, {"a": 1, "b": 1}, every=2) as company:
        company.peer("b", "run", "training.steps=2", "logging.noise_scale=1", peers={"timeout": 0.5})
    rows = [json.loads(each) for each in (tmp_path / "run/b/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "noise_scale" in row] == [0, 1]


@pytest.mark.tour
def test_evaluations_are_of_the_common_weights(tmp_path):
    """They equal the checkpoint of the same step, and not the weights of one peer before the round."""
    evaluated = {"evaluation": {"every": 2, "batches": 2}, "training": {**VALUES["training"], "steps": 4}}
    with Company(tmp_path, {"a": 1, "b": 1}, every=2) as company:
        company.run("run", **evaluated)
    losses = [
        [row["validation"] for row in map(json.loads, text.splitlines()) if "validation" in row]
        for text in ((tmp_path / f"run/{name}/metrics.jsonl").read_text() for name in "ab")
    ]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
