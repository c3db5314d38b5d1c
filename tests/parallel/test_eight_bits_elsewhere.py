"""8-bit products outside of training: decoding, scoring, what is exchanged with transformers, and plans."""

from __future__ import annotations

import pytest
import torch

from megatron.checkpoint.hf.config import hf_config
from megatron.config import resolve
from megatron.config.variants import overlay
from megatron.model.stack import build_model
from tests.parallel.test_eight_bits import settings
from tests.plan.test_search import LLAMA, question

BOTH = ("compute", "fp8")


@pytest.fixture(scope="module")
def models():
    return {each: build_model(resolve(settings(each))).eval() for each in BOTH}


def drawn(samples: int, length: int) -> torch.Tensor:
    return torch.randint(96, (samples, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("pieces", [[1] * 11, [7, 1, 3], [11]])
def test_tokens_one_by_one_are_those_of_a_whole_text(models, pieces: list[int]):
    """By any number of tokens at a time: a number is rounded alike whatever stands next to it. Sums in another order
    bring one number in 10^5 over the middle between two 8-bit ones, so the bound is a tenth of what rounding does."""
    tokens = drawn(2, 11)
    with torch.no_grad():
        exact, whole = (models[each].logits(tokens) for each in BOTH)
        state, begin, found = models["fp8"].new_state(), 0, []
        for piece in pieces:
            found.append(models["fp8"].decode(tokens[:, begin : begin + piece], state, begin))
            begin += piece
    rounding = (whole - exact).norm()
    assert rounding > 1e-3 * exact.norm()
    assert (torch.cat(found, 1) - whole).norm() < 0.1 * rounding


@pytest.mark.parametrize("shape", [(1, 5), (3, 31)])
def test_texts_of_any_length_are_scored(models, shape: tuple[int, int]):
    """In training tokens come in sixteens, since products of gradients sum over them. An evaluation has none."""
    tokens = drawn(shape[0], shape[1] + 1)
    with torch.no_grad():
        exact, found = (
            models[each](tokens[:, :-1], tokens[:, 1:], torch.full(shape, 1 / (shape[0] * shape[1])))[1]
            for each in BOTH
        )
    assert found.shape == shape and not torch.equal(found, exact)
    assert (found - exact).abs().max() < 0.1  # of ln 96 = 4.6


def test_weights_and_what_transformers_reads_are_the_same(models):
    plain, rounded = (dict(models[each].named_parameters()) for each in BOTH)
    assert plain.keys() == rounded.keys()
    for name, weight in plain.items():
        assert weight.dtype == rounded[name].dtype and torch.equal(weight, rounded[name])
    (first, theirs), (second, same) = (hf_config(resolve(settings(each))) for each in BOTH)
    assert first is second and theirs.to_dict() == same.to_dict()


def test_plans_count_them_as_others_and_propose_what_may_start():
    """No layout that a start would refuse. Of the other ones, memory and time of products in `compute`."""
    usual = {each.choice: each for each in question(LLAMA, 4).answers().plans}
    answers = question(overlay(LLAMA, {"precision": {"compute": "bf16", "products": "fp8"}}), 4).answers()
    found = {each.choice: each for each in answers.plans}
    assert found and {choice.tensor for choice in found} == {1} < {choice.tensor for choice in usual}
    assert any("fp8 must go with parallel.tensor: 1" in rule for rule in answers.refused)
    for choice, plan in found.items():
        assert plan.memory == usual[choice].memory and plan.step == usual[choice].step


def test_plans_with_cuda_graphs_recompute_nothing():
    values = overlay(LLAMA, {"training": {"cuda_graphs": True}, "precision": {"compute": "bf16"}})
    found = question(values, 4).answers().plans
    assert found and {each.choice.recompute for each in found} == {"none"}
    for choice in (each.choice for each in found):
        resolve(overlay(values, choice.values()), ranks=4)
