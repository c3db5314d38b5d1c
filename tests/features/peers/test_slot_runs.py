"""Whole runs of peers that share gradients: data parallelism on several layouts, lost peers, healing, replays."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.testing import on_ranks, train_on_ranks
from megatron.testing.runs import train_on_this_rank
from tests.features.peers.companies import VALUES, Company, act, free, serving, tensors
from tests.features.peers.test_peer_runs import lines, same, wait_for

KEYS = {"every": 1, "algorithm": "gradients"}


def in_double(*arguments):
    """`train_on_this_rank` with weights, gradients and sums in float64."""
    from megatron.engine.deepspeed import sum_of_squares
    from megatron.parallel.layout.precision import COMPUTE_TYPES

    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.dict(COMPUTE_TYPES, fp32=torch.float64),
            mock.patch.object(sum_of_squares, "_squares", lambda parts: sum(each.square().sum() for each in parts)),
        ):
            return train_on_this_rank(*arguments)
    finally:
        torch.set_default_dtype(torch.float32)


def test_slots_are_data_parallelism_in_float64(tmp_path):
    """Three peers, one of them on tensor parallel ranks, against one process with the whole batch. Without clipping,
    whose norm in the plain run is fp32."""
    words = ["training.steps=4", "optimizer.gradient_clipping=0"]
    with Company(tmp_path, {"a": 1, "b": 2, "c": 1}, **KEYS) as company:
        company.train = in_double
        rows = company.run("peers", *words, own={"b": ["parallel.tensor=2"]})
        found = [company.tensors("peers", name, 4) for name in company.peers]
    whole = {**VALUES, "run": {"dir": str(tmp_path / "plain")}}
    plain_rows = on_ranks(1, in_double, whole, [*words, "training.global_batch_size=6"], 1)[0]
    plain = tensors(tmp_path / "plain", 4)
    assert plain and all(each.dtype == torch.float64 for key, each in plain.items())
    for key, values in plain.items():
        for each in found:
            assert torch.equal(each[key], found[0][key])
            torch.testing.assert_close(each[key], values, rtol=1e-12, atol=1e-12)
    for each in rows:
        for row, wanted in zip(each, plain_rows, strict=True):
            assert row["batch_hash"] == wanted["batch_hash"]
            assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
            assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-6)


@pytest.mark.tour
@pytest.mark.parametrize(
    "layout", [["zero.stage=3"], ["zero.stage=1", "precision.compute=bf16"], ["parallel.pipeline=2"]], ids=str
)
def test_other_stages(tmp_path, layout):
    with Company(tmp_path, {"a": 2, "b": 2}, **KEYS) as company:
        company.run("peers", "training.steps=4", *layout)
        found = [company.tensors("peers", name, 4) for name in company.peers]
    assert same(*found)
    whole = {**VALUES, "run": {"dir": str(tmp_path / "plain")}}
    train_on_ranks(2, whole, ["training.steps=4", "training.global_batch_size=4", *layout])
    for key, values in tensors(tmp_path / "plain", 4).items():
        # Four steps of AdamW, each of about lr = 0.01. Its sign may differ where a gradient rounds to 0.
        far = (found[0][key].float() - values.float()).abs() > 1e-3
        assert far.float().mean() < 0.01, key


@pytest.mark.tour
def test_a_lost_peer_is_replaced_and_heals_from_a_living_one(tmp_path):
    """Over sockets. b dies in step 3 without a checkpoint. a computes its slot, and deletes old gradients. b takes a's
    state while a trains. All ends are the bits of the run without faults, and of the replay."""
    shared, steps = tmp_path / "faulty/shared", "training.steps=16"
    with Company(tmp_path, {"a": 1, "b": 1}, **KEYS, state_every=2) as company:
        company.run("plain", steps)
        key = bytes.fromhex(Path(company.keys["key_file"]).read_text())
        with ThreadPoolExecutor(2) as threads, serving(shared, "peers", "ab", key) as url:
            hasty = {"timeout": 1.0, "folder": url}
            hold = [act(step=9, wait=str(shared / "wanted/b"))]
            a = threads.submit(company.peer, "a", "faulty", steps, hooks=hold, peers=hasty)
            with pytest.raises(RuntimeError, match="rank 0 died"):
                company.peer("b", "faulty", steps, hooks=[act(step=3, kill=True)], peers=hasty)
            wait_for(shared / "rounds/00000007.json")
            company.peer("b", "faulty", steps, peers=hasty)
            a.result()
        found = lines(shared)
        assert [each["slots"][1]["peer"] for each in found[:9]] == ["b"] * 3 + ["a"] * 6
        assert found[3]["absent"] == {"b": "silent"} and any(each["serve"] for each in found)
        assert '"event": "peers_jump"' in (tmp_path / "faulty/b/ledger.jsonl").read_text()
        company.peer("a", "replay", steps, peers={"replay": str(shared)})
        plain = company.tensors("plain", "a", 16)
        for run, name in (("plain", "b"), ("faulty", "a"), ("faulty", "b"), ("replay", "a")):
            assert same(plain, company.tensors(run, name, 16)), (run, name)


@pytest.mark.tour
def test_a_skipped_slot_is_replayed(tmp_path):
    """With `skip`, the mean is over the labels of the other slots, and the ledger says so."""
    steps = "training.steps=4"
    with Company(tmp_path, {"a": 1, "b": 1}, **KEYS, lost_slots="skip", slots=4) as company:
        company.peer("a", "alone", steps, peers={"timeout": 0.3})
        found = lines(tmp_path / "alone/shared")
        assert [each is None for each in found[0]["slots"]] == [False, False, True, True]
        assert all(None not in each["slots"] for each in found[1:])  # a has all slots from then on
        company.peer("a", "replay", steps, peers={"replay": str(tmp_path / "alone/shared")})
        assert same(company.tensors("alone", "a", 4), company.tensors("replay", "a", 4))


@pytest.mark.tour
def test_too_few_peers_save_and_stop_and_the_next_start_continues(tmp_path):
    """Gradients go from peer to peer, and have the bits of those in a folder."""
    direct = {name: [f"peers.listen={free()}"] for name in "ab"}
    with Company(tmp_path, {"a": 1, "b": 1}, **KEYS, quorum=2) as company:
        company.run("plain", "training.steps=4")
        company.run("run", "training.steps=4", "training.stop_at_step=2", own=direct)
        company.peer("a", "run", "training.steps=4", *direct["a"], peers={"timeout": 0.3, "patience": 0.6})
        assert "1 of 2 peers (peers.quorum) in step 2" in (Path(tmp_path) / "run/a/ledger.jsonl").read_text()
        company.run("run", "training.steps=4", own=direct)
        assert same(company.tensors("plain", "a", 4), company.tensors("run", "b", 4))
    assert len(json.loads((tmp_path / "run/shared/rounds/00000003.json").read_text())["signed"]["slots"]) == 2
