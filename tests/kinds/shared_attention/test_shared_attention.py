"""Weights that several layers share: one parameter, copies on pipeline stages, what a call keeps, its own dropout."""

from __future__ import annotations

import pytest
import torch

from megatron.config import resolve
from megatron.config.pattern import blocks_of, call_numbers
from megatron.model.costs.describe import layers
from megatron.model.partition import copies
from megatron.model.stack import build_model
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named, randomise, relative
from tests.model.test_recomputation import Allocations

S, V = 32, 37


def config_of(pattern: str, shared: dict | None = None, **sections):
    model, ranks = sections.pop("model", {}), sections.pop("ranks", 1)
    return resolve(
        {
            "model": {
                "layers": pattern,
                "hidden_size": 24,
                "vocab_size": V,
                "norm": {"type": "rmsnorm"},
                "mamba2": {"head_dim": 4, "state_size": 6, "groups": 2, "chunk": 8},
                "shared_attention": {"heads": 4, "kv_heads": 2, "adapter_rank": 3, **(shared or {})},
                **model,
            },
            "training": {"steps": 1, "sequence_length": S, **sections.pop("training", {})},
            **sections,
        },
        ranks=ranks,
    )


def tokens_of(seed: int) -> torch.Tensor:
    return torch.randint(V, (2, S), generator=torch.Generator().manual_seed(seed))


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens_of(1), tokens_of(2), torch.ones(2, S))[0].backward()
    return {name: p.grad.clone() for name, p in named(model).items()}


def test_calls_are_numbered_by_kind():
    pattern = (
        "mamba2+shared_attention mamba2 mamba2+shared_attention@a (mamba2+shared_attention "
        "mamba2+shared_attention@a) x2"
    )
    assert call_numbers(blocks_of(pattern)) == [(0,), (), (0,), (1,), (1,), (2,), (2,)]


def test_a_shared_block_is_the_sum_of_its_uses():
    """With one block per call, equal in value, the gradients of the blocks add up to the gradients of the shared
    one."""
    one = build_model(config_of("mamba2+shared_attention x3", {"blocks": 1}), dtype=DOUBLE)
    three = build_model(config_of("mamba2+shared_attention x3", {"blocks": 3}), dtype=DOUBLE)
    randomise(one, 3)
    with torch.no_grad():
        for name, p in named(three).items():
            head, _, rest = name.partition("shared_attention.")
            own = name if head else f"shared_attention.0.{rest.split('.', 1)[1]}"
            p.copy_(named(one)[own])
    shared, apart = gradients(one), gradients(three)
    for name, gradient in shared.items():
        if name.startswith("shared_attention.0."):
            last = name.removeprefix("shared_attention.0.")
            parts = [apart[f"shared_attention.{number}.{last}"] for number in range(3)]
            assert all(relative(part, gradient) > 0.01 for part in parts), name
            assert relative(sum(parts), gradient) < EXACT, name
        else:
            assert relative(apart[name], gradient) < EXACT, name


@pytest.mark.parametrize(
    "split, tied, wanted",
    [
        ([1, 1, 1, 1], False, {"shared_attention.0": (0, 2), "shared_attention.1": (1, 3)}),
        ([1, 2, 1], True, {"embedding.tokens": (0, 2), "shared_attention.0": (0, 1), "shared_attention.1": (1, 2)}),
        ([3, 1], False, {"shared_attention.1": (0, 1)}),
        ([4], True, {}),
    ],
)
def test_copies_on_stages(split: list[int], tied: bool, wanted: dict):
    config = config_of(
        "mamba2+shared_attention x4",
        {"blocks": 2},
        model={"embedding": {"tied": tied}},
        parallel={"pipeline": len(split), "pipeline_split": split},
        ranks=len(split),
    )
    found = copies(config)
    assert {name: stages for name, stages in found.items() if len(set(stages)) > 1} == wanted


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_kept_activations(mode: str, adapters: bool):
    """Bytes that exist between forward and backward: what a second call adds to a layer. RMSNorm on CPU also keeps the
    normalised vector."""

    def kept(pattern: str) -> tuple[int, int]:
        config = config_of(
            pattern,
            {"attention_adapters": adapters, "position": "none"},
            training={"activation_checkpointing": {"mode": mode}},
        )
        model = build_model(config)
        with Allocations(model.parameters()) as allocations:
            loss, _ = model(tokens_of(1), tokens_of(2), torch.ones(2, S))
        found = allocations.bytes()
        loss.backward()
        return found, layers(config)[-2].saved

    (one, plain), (two, call) = kept("mamba2+shared_attention mamba2"), kept("mamba2+shared_attention x2")
    tokens, H = 2 * S, 24
    norms = 3 * H if mode == "none" else 0
    assert two - one == pytest.approx((call - plain + norms) * tokens * 4, rel=0.002)


def test_each_call_draws_its_own_dropout():
    """With equal inputs, two calls of one shared block differ only by their draws. In evaluation they do not."""
    model = build_model(config_of("mamba2+shared_attention x2", {"dropout": 0.5, "adapter_rank": 0}))
    randomise(model, 4)
    with torch.no_grad():
        first, second = (block.side_layers[0] for block in model.blocks)
        second.output.weight.copy_(first.output.weight)
        stream = model.embedding(tokens_of(5), samples=torch.arange(2))
        x = torch.randn(2, S, 24, generator=torch.Generator().manual_seed(6))
        model.train()
        assert first(x, stream).equal(first(x, stream)) and relative(first(x, stream), second(x, stream)) > 0.01
        model.eval()
        assert first(x, stream).equal(second(x, stream))
