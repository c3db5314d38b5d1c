"""Manifold-constrained hyper-connections against transformers' module of DeepSeek-V4, and their start."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from megatron.config import ConfigError, resolve
from megatron.model.hyper_connections import balanced, joined
from megatron.model.stack import build_model
from tests.float64 import DOUBLE, EXACT, wider
from tests.model.parity import named, randomise, relative

H, S, ROWS = 24, 10, 4


def config_of(streams: int, **residual):
    return resolve({
        "model": {
            "layers": "(attention/mlp) x2",
            "hidden_size": H,
            "vocab_size": 37,
            "norm": {"type": "rmsnorm", "epsilon": 1e-3},
            "attention": {"heads": 3},
            "residual": {"streams": streams, **residual},
        },
        "training": {"steps": 1, "sequence_length": S},
    })


@pytest.mark.parametrize("last", [False, True])
def test_equals_transformers(last: bool):
    """The input of the layer, the weights and the rows afterwards, and all gradients."""
    theirs_config = hf.DeepseekV4Config(hidden_size=H, hc_mult=ROWS, hc_sinkhorn_iters=7, rms_norm_eps=1e-3)
    theirs = (DeepseekV4HyperHead if last else DeepseekV4HyperConnection)(theirs_config).double()
    randomise(theirs, 3, std=0.3)
    block = build_model(config_of(ROWS, sinkhorn_iterations=7), dtype=DOUBLE).blocks[1]
    ours = block.collapse if last else block.connections["mixer"]
    names = {f"{'hc_' if last else ''}{each}": each for each in ("base", "scale")}
    pairs = {"hc_fn" if last else "fn": "projection", **names}
    pairs = {name: {"base": "bias"}.get(mine, mine) for name, mine in pairs.items()}
    with torch.no_grad():
        for name, mine in pairs.items():
            getattr(ours, mine).copy_(getattr(theirs, name))
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, S, ROWS, H, generator=generator).to(DOUBLE)
    y = torch.randn(2, S, H, generator=generator).to(DOUBLE)
    mine, other = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    x, *weights = ours(mine)
    with wider():
        if last:
            found = [theirs(other)]
        else:
            post, comb, collapsed = theirs(other)
            found = [collapsed, post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ other]
    made = [x] if last else [x, joined(y, mine, *weights)]
    for own, wanted in zip(made, found, strict=True):
        assert relative(own, wanted) < EXACT
    sum((each * each.detach().cos()).sum() for each in made).backward()
    sum((each * each.detach().cos()).sum() for each in found).backward()
    assert relative(mine.grad, other.grad) < EXACT
    for name, own in pairs.items():
        assert relative(getattr(ours, own).grad, getattr(theirs, name).grad) < EXACT, name


def test_mixing_matrices_are_doubly_stochastic():
    """Twenty rounds on logits of a deviation of 1 leave sums within a thousandth of 1."""
    logits = torch.randn(200, ROWS, ROWS, generator=torch.Generator().manual_seed(2)).to(DOUBLE)
    matrix = balanced(logits, 20)
    assert (matrix > 0).all()
    for dim in (-1, -2):
        assert (matrix.sum(dim) - 1).abs().max() < 1e-3


def test_it_starts_as_one_stream():
    """With equal weights of the layers the logits differ by what the small factors (0.01) let through."""
    one, several = (build_model(config_of(streams), dtype=DOUBLE).eval() for streams in (1, ROWS))
    mine, others = named(one), named(several)
    with torch.no_grad():
        for name, p in mine.items():
            others[name].copy_(p)
        for name, p in others.items():
            if name.endswith("scale") and "rows" in name:
                p.zero_()
    tokens = torch.randint(37, (2, S), generator=torch.Generator().manual_seed(3))
    # what is added to the weights, 1e-6 each, is left
    assert relative(several.logits(tokens), one.logits(tokens)) < 1e-4
    assert set(others) - set(mine) == {name for name in others if "rows" in name}


def test_what_reads_one_stream_is_refused():
    with pytest.raises(ConfigError) as error:
        config_of(2, form="parallel", channel_scales=True)
    assert "streams must be 1 in the parallel form" in str(error.value) and "channel_scales" in str(error.value)
