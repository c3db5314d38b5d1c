"""Loki and SiftAttention: full attention at their limits, formulas of their papers, and company that changes no bit."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest
import torch

from megatron import api
from megatron.config import ConfigError, resolve
from megatron.config.problems import UserError
from megatron.decoding.covered import cannot_read_less, evaluation_problem, heads_of
from megatron.decoding.read_less import Components, calibrate, chosen, loss_of, of_evaluation, read, sift, write
from megatron.decoding.reading_options import add_options
from megatron.decoding.schedule import Request
from megatron.kinds.common.attention.fewer_keys import Loki, Moments, Reads, RowGroup, Sift, power_law, quantiles
from megatron.model.stack import build_model
from megatron.parallel.layout.mesh import Mesh
from tests.decoding.test_company import answers, model_of, requests
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import relative
from tools.calibrate import main

PLAIN = "mixtral"  # grouped heads and rotary positions, without windows


def texts(count: int = 4, length: int = 70) -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return torch.randint(60, (count, length), generator=draw).tolist()


def plain(dtype: torch.dtype = DOUBLE) -> Any:
    model = model_of(PLAIN, dtype)
    assert cannot_read_less(model.plan.config) is None
    return model


def identity(model: Any) -> Components:
    heads = heads_of(model.plan.config)
    bases = [torch.eye(D, dtype=DOUBLE).expand(m, D, D) for _, m, D in heads]
    return Components(bases, [torch.ones(m, D, dtype=DOUBLE) for _, m, D in heads])


@pytest.mark.parametrize("way", ["loki", "loki, shared blocks", "sift, long warmup", "sift, quantile 0"])
def test_limits_are_full_attention(way: str) -> None:
    """All components and all keys, a warmup as long as the text, and the smallest quantile."""
    model, asked = plain(), [*requests()[:4], Request(tuple(texts(1, 50)[0]), 0, 9, scored=40)]
    if "shared" in way:
        model = model_of("zamba2", DOUBLE)
    full, wanted, _ = answers(model, asked)
    found = calibrate(model, texts())
    D = found.variances[0].shape[-1]
    reading = found.reading(D, 1.0) if "loki" in way else sift(0.8, 100) if "long" in way else sift(0.0, 4)
    drawn, logits, _ = answers(model, asked, reading=reading)
    assert [each.tokens for each in drawn] == [each.tokens for each in full]
    assert max(relative(row, wanted[key]) for key, row in logits.items()) < EXACT
    assert drawn[-1].scores == pytest.approx(full[-1].scores, abs=1e-9)


@pytest.mark.parametrize("way", ["loki", "sift"])
def test_company_changes_no_bit(way: str) -> None:
    model, asked = plain(torch.float32), requests()
    found = calibrate(model, texts())
    reading = found.reading(3, 0.25) if way == "loki" else sift(0.7, 2)
    alone = [answers(model, [each], reading=reading)[0][0] for each in asked]
    for how in ({"rows": 3, "budget": 17}, {"pages": 5}):
        drawn, _, decoder = answers(model, asked, reading=reading, **how)
        assert drawn == alone
    assert decoder.schedule.preempted
    full = answers(model, asked)[0]
    assert [each.log_p for each in full] != [each.log_p for each in alone], "something was not read"


def a_group(length: int = 60, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RowGroup]:
    """Queries of two heads for one key head, keys and values in two pages of each text."""
    draw = torch.Generator().manual_seed(2)
    pages = torch.arange(1, 2 * rows + 1).view(rows, 2)
    q = torch.randn(rows, 2, 8, generator=draw, dtype=DOUBLE)
    keys, values = (torch.randn(2 * rows + 1, 1, 32, width, generator=draw, dtype=DOUBLE) for width in (8, 5))
    places = torch.tensor([length - 1 - row for row in range(rows)])
    return q, keys, values, RowGroup(torch.arange(rows), places, torch.arange(rows), torch.full((rows,), 9), pages)


def by_hand(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: RowGroup, keep: Any) -> torch.Tensor:
    """One row and head after the other. `keep` has (row, head, probabilities or logits) and returns the places."""
    y = torch.zeros(*q.shape[:2], values.shape[-1], dtype=DOUBLE)
    for row in range(len(q)):
        k, v = (pool[group.pages[row], 0].flatten(0, 1)[: group.places[row] + 1] for pool in (keys, values))
        for head in range(q.shape[1]):
            logits = k @ q[row, head] * 0.3
            kept = keep(row, head, logits, k)
            weights = logits[kept].exp()
            y[row, head] = weights @ v[kept] / weights.sum()
    return y


@pytest.mark.parametrize(("rank", "count"), [(8, 5), (3, 5), (3, 64), (1, 20)])
def test_loki_reads_the_keys_that_its_components_choose(rank: int, count: int) -> None:
    q, keys, values, group = a_group()
    reads = Reads(measures=True)
    found = Loki(torch.eye(8, dtype=DOUBLE)[None], rank, count, reads).attend(q, keys, values, group, 0.3)

    def keep(row: int, head: int, logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k[:, :rank] @ q[row, head, :rank]).topk(min(count, len(k))).indices

    assert relative(found, by_hand(q, keys, values, group, keep)) < EXACT
    assert (reads.read, reads.full) == (3 * (64 * rank + 2 * count * 13), 3 * 64 * 13)
    exact = [set(map(int, keep_of(q, keys, group, row, head, 8, count))) for row in range(3) for head in range(2)]
    low = [set(map(int, keep_of(q, keys, group, row, head, rank, count))) for row in range(3) for head in range(2)]
    wanted = sum(len(one & other) / len(one) for one, other in zip(exact, low)) / 6
    assert reads.recall / reads.heads == pytest.approx(wanted) and (rank < 8 or wanted == 1)


def keep_of(q: Any, keys: Any, group: RowGroup, row: int, head: int, rank: int, count: int) -> torch.Tensor:
    k = keys[group.pages[row], 0].flatten(0, 1)[: group.places[row] + 1]
    return (k[:, :rank] @ q[row, head, :rank]).topk(min(count, len(k))).indices


def test_keys_of_low_rank_are_found_by_that_rank() -> None:
    """Keys in r dimensions: r components choose as all of them do. The components equal a singular value decomposition
    of the centred keys."""
    draw = torch.Generator().manual_seed(4)
    k_TmD = torch.randn(50, 2, 3, generator=draw, dtype=DOUBLE) @ torch.randn(3, 8, generator=draw, dtype=DOUBLE)
    moments = Moments()
    moments.see(k_TmD[:20])
    moments.see(k_TmD[20:])
    bases, variances = moments.components()
    for head in range(2):
        centred = k_TmD[:, head] - k_TmD[:, head].mean(0)
        _, singular, right = torch.linalg.svd(centred)
        assert variances[head].tolist() == pytest.approx((singular**2 / 50).tolist(), abs=1e-9)
        assert (right[:3] @ bases[head][:, :3]).abs().diagonal().tolist() == pytest.approx([1.0] * 3, abs=1e-9)
    components = Components([bases], [variances])
    assert components.rank(0.9999) == [3] or components.rank(0.9999) == [2]
    turned = Loki(bases, 3, 4).turned(k_TmD)
    q = torch.randn(7, 2, 8, generator=draw, dtype=DOUBLE)
    own = Loki(bases, 3, 4).turned(q)
    assert relative(torch.einsum("thd,shd->hts", own, turned), torch.einsum("thd,shd->hts", q, k_TmD)) < EXACT


def test_sift_reads_values_above_a_power_law() -> None:
    q, keys, values, group = a_group()
    levels = 0.03 * torch.arange(1, 5, dtype=DOUBLE) ** -0.4
    one = Sift(0.8, 4, reads=Reads(measures=True), noted=levels.expand(3, 1, 2, 4).clone())
    found = one.attend(q, keys, values, group, 0.3)
    kept_values, dropped = 0, 0.0

    def keep(row: int, head: int, logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        nonlocal kept_values, dropped
        probabilities = logits.softmax(0)
        kept = probabilities >= 0.03 * 9**-0.4
        kept[-1] = kept[probabilities.argmax()] = True
        kept_values, dropped = kept_values + int(kept.sum()), dropped + float(probabilities[~kept].sum())
        assert float(probabilities[~kept].sum()) <= 0.03 * 9**-0.4 * int((~kept).sum())
        return kept.nonzero().squeeze(1)

    wanted = by_hand(q, keys, values, group, keep)
    assert relative(found, wanted) < EXACT and 6 < kept_values < 300
    assert one.reads.read == 3 * 64 * 8 + kept_values * 5 and one.reads.dropped == pytest.approx(dropped)
    whole = by_hand(q, keys, values, group, lambda row, head, logits, k: torch.arange(len(k)))
    worst = float(values.norm(dim=-1).max())
    assert float((found - whole).norm(dim=-1).max()) <= 2 * dropped * worst


def test_power_laws_and_quantiles() -> None:
    i = torch.arange(1, 13, dtype=DOUBLE)
    a, b = power_law(torch.stack([0.7 * i**-1.3, 0.01 * i**0.2]))
    assert a.tolist() == pytest.approx([0.7, 0.01], rel=1e-6) and b.tolist() == pytest.approx([1.3, -0.2], rel=1e-6)
    draw = torch.rand(2, 1, 3, 40, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    found = quantiles(draw, torch.tensor([40, 17]), 0.83)
    for row, length in enumerate((40, 17)):
        wanted = draw[row, ..., :length].quantile(0.83, -1)
        assert found[row].flatten().tolist() == pytest.approx(wanted.flatten().tolist())


def test_the_file_of_components(tmp_path) -> None:
    model = plain()
    found, heads, path = calibrate(model, texts()), heads_of(model.plan.config), tmp_path / "my.loki"
    write(path, found)
    again = read(path, heads)
    assert all(one.equal(other) for one, other in zip(found.bases + found.variances, again.bases + again.variances))
    given = argparse.ArgumentParser()
    add_options(given)
    reading = chosen(given.parse_args(["--loki", str(path), "--rank", "2", "--keys", "0.5"]), model.plan.config, "cpu")
    assert reading is not None and loss_of(model, texts(), reading, 40) > 0
    for words, rule in (
        (["--loki", str(path), "--sift", "0.5"], "must not be given together"),
        (["--loki", str(tmp_path / "none")], "there is no such file"),
        (["--loki", str(path), "--keys", "0"], "--keys must be"),
        (["--sift", "1"], "--sift must be"),
    ):
        with pytest.raises(UserError, match=rule):
            chosen(given.parse_args(words), model.plan.config, "cpu")
    with pytest.raises(UserError, match="components of 3 layers"):
        read(path, [*heads, heads[0]][:3])
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(UserError, match="cannot be read"):
        read(path, heads)
    kept = Components(found.bases, [each.clone() for each in found.variances])
    kept.variances[-1][0, 1] = float("nan")
    write(path, kept)
    with pytest.raises(UserError, match="must have variances"):
        read(path, heads)
    with pytest.raises(SystemExit):  # before anything is read
        main(["runs/none", "--file", "a", "--output", str(path), "--measure", "--picture", str(path)])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v2", "latents"),
        ("gpt_oss", "sliding window|softcap or sinks"),
        ("rwkv4", "no layer keeps keys"),
        ("deepseek_v32", "latents"),
    ],
)
def test_kinds_that_cannot_read_less(name: str, reason: str) -> None:
    config = api.resolve(f"test/tiny_{name}").config
    found = cannot_read_less(config)
    assert found is not None and re.search(reason, found), found


def test_a_depth_in_which_keys_are_of_passes() -> None:
    own = {"layers": "attention/mlp recurrent(attention/mlp) attention/mlp", "attention": {"heads": 4}}
    given = {"model": {**own, "hidden_size": 32, "vocab_size": 61}, "training": {"steps": 1, "sequence_length": 128}}
    assert "recurrent core" in str(cannot_read_less(resolve(given)))


def test_ways_of_evaluation_are_checked_before_a_start(tmp_path: Any) -> None:
    """Mistakes between keys are sentences. Numbers above 1 are counts."""
    shape = {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 257, "attention": {"heads": 4}}
    base = {"model": shape, "training": {"steps": 1, "sequence_length": 64}}

    def problem(evaluation: dict[str, Any], ranks: int = 1, **more: Any) -> str:
        return str(evaluation_problem(resolve({**base, **more, "evaluation": evaluation}, ranks=ranks)))

    experts = {"model": {**shape, "layers": "attention/moe", "moe": {"capacity_factor": 1.0}}}
    assert problem({"exact": True, "read_less": {"sift": 0.5}}) == "None"
    assert "experts with a capacity" in problem({"exact": True}, **experts)
    assert "not both" in problem({"read_less": {"sift": 0.5, "loki": "a"}})
    assert "cannot read less" in problem({"read_less": {"sift": 0.5}}, **experts)
    assert "whole number" in problem({"read_less": {"loki": "a", "rank": 2.5}})
    assert "below 1 or a number above 1" in problem({"read_less": {"loki": "a", "rank": 1}})
    for unused in ({"sift": 0.5, "keys": 3}, {"loki": "a", "warmup": 3}, {"rank": 4}):
        assert "must come with" in problem({"read_less": unused})
    stages: Any = {"parallel": {"pipeline": 2}, "zero": {"stage": 0}}
    assert "without pipeline stages" in problem({"read_less": {"loki": "a"}}, 2, **stages)
    assert problem({"read_less": {"sift": 0.5}}, 2, **stages) == "None"
    for wrong in ({"sift": 1.0}, {"warmup": 1}, {"keys": 0}):
        with pytest.raises(ConfigError):
            resolve({**base, "evaluation": {"read_less": wrong}})
    config = resolve({**base, "evaluation": {"read_less": {"loki": str(tmp_path / "a"), "rank": 3, "keys": 1}}})
    model = build_model(config, dtype=DOUBLE)
    write(tmp_path / "a", calibrate(model, texts()))
    found = of_evaluation(config, "cpu", Mesh.single())
    assert found is not None
    layer: Any = found(1)
    assert (layer.rank, layer.keys) == (3, 1.0) and layer.count(50) == 50
