"""Dropout is a function of (seed, site, sample, place), never of the order of calls."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.config import resolve
from megatron.model.stack import build_model
from megatron.parallel.layout.random import dropout, sequence_counters, site_key, uniform
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named, relative

S, V = 16, 31


def config_of(mode: str = "none", seed: int = 1, **model):
    values = {
        "layers": "(attention/mlp) x2",
        "hidden_size": 16,
        "vocab_size": V,
        "attention": {"heads": 2, "dropout": 0.2},
        "dropout": 0.3,
        **model,
    }
    return resolve({
        "model": values,
        "training": {"steps": 1, "sequence_length": S, "seed": seed, "activation_checkpointing": {"mode": mode}},
    })


def batch(samples: list[int]):
    """Each sample's tokens are a function of its number."""
    rows = [torch.randint(V, (2, S), generator=torch.Generator().manual_seed(sample)) for sample in samples]
    tokens, labels = torch.stack(rows).unbind(1)
    return tokens, labels, torch.ones(len(samples), S), torch.tensor(samples)


def gradients(model, samples: list[int]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    tokens, labels, weights, numbers = batch(samples)
    model(tokens, labels, weights, samples=numbers)[0].backward()
    return {name: p.grad.clone() for name, p in named(model).items()}


def test_uniform_is_uniform():
    draws = uniform(site_key(3, "x"), torch.arange(40), sequence_counters(torch.arange(100), 64))
    assert draws.shape == (40, 100, 64) and draws.min() >= 0 and draws.max() < 1
    counts = torch.histc(draws, bins=64, min=0, max=1)
    expected = draws.numel() / 64
    assert ((counts - expected).square() / expected).sum() < 63 + 5 * (2 * 63) ** 0.5, "chi-squared of 64 bins"
    flat = draws - 0.5
    for lag in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):  # neighbouring samples, positions and channels are independent
        shifted = flat.roll(lag, (0, 1, 2))
        assert abs((flat * shifted).mean() * 12) < 5 / draws.numel() ** 0.5


def test_keys_and_samples_are_independent():
    counters, samples = sequence_counters(torch.arange(64), 64), torch.tensor([5])
    near = [
        uniform(site_key(seed, "layers", layer), samples, counters).flatten() - 0.5
        for seed in (1, 2)
        for layer in (0, 1)
    ]
    near += [
        uniform(site_key(1, "layers", 0), torch.tensor([n]), counters).flatten() - 0.5
        for n in (6, 5 + (1 << 32), 1 << 40)
    ]
    for one, two in itertools.combinations(near, 2):
        assert abs((one * two).mean() * 12) < 5 / 64


def test_rate_and_scale():
    x = torch.ones(8, 50, 64)
    y = dropout(x, 0.3, site_key(1, "x"), torch.arange(8), sequence_counters(torch.arange(50), 64))
    kept = y != 0
    assert kept.float().mean().item() == pytest.approx(0.7, abs=5 * (0.21 / x.numel()) ** 0.5)
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 0.7))


def test_golden_draws():
    """Draws are part of a run's identity: these must never change."""
    draws = uniform(0x12345678, torch.tensor([0, 7, 1 << 33]), torch.arange(3))
    again = torch.tensor([[mixed(0x12345678, s, c) for c in range(3)] for s in (0, 7, 1 << 33)])
    assert draws.equal(again)


def mixed(key: int, sample: int, counter: int) -> float:
    """The same mixer in Python integers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x21F0AAAD & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x735A2D97 & 0xFFFFFFFF
        return x ^ (x >> 15)

    own = mix(mix((sample & 0xFFFFFFFF) ^ key) ^ (sample >> 32))
    return (mix((mix(counter ^ own) + own) & 0xFFFFFFFF) >> 8) / (1 << 24)


def test_every_site_drops():
    for change in ({"dropout": 0.0}, {"attention": {"heads": 2}}):
        dropped = build_model(config_of(**change))
        tokens, labels, weights, numbers = batch([0, 1])
        first = dropped(tokens, labels, weights, samples=numbers)[0]
        other = dropped(tokens, labels, weights, samples=numbers + 2)[0]
        assert first != other
        dropped.eval()
        assert dropped(tokens, labels, weights, samples=numbers)[0] == dropped(tokens, labels, weights)[0]


def test_the_split_into_micro_batches_changes_nothing():
    model = build_model(config_of(), dtype=DOUBLE)
    whole = gradients(model, [4, 5, 6, 7])
    parts = [gradients(model, part) for part in ([7], [4, 6], [5])]
    for name, gradient in whole.items():
        assert relative(sum(part[name] for part in parts), gradient) < EXACT, name


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_drops_the_same(mode: str):
    plain, recomputed = build_model(config_of()), build_model(config_of(mode))
    wanted, found = gradients(plain, [4, 5]), gradients(recomputed, [4, 5])
    assert all(found[name].equal(wanted[name]) for name in wanted)


def test_the_generator_of_torch_is_not_used():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    gradients(build_model(config_of()), [1])
    assert torch.get_rng_state().equal(before)
    other = gradients(build_model(config_of(seed=2)), [1])
    assert not other["head.weight"].equal(gradients(build_model(config_of()), [1])["head.weight"])


def test_expected_value_of_attention_dropout():
    """Averaged over samples, dropout of probabilities leaves the output as it is."""
    config = config_of(layers="attention", dropout=0.0, attention={"heads": 2, "dropout": 0.4})
    model = build_model(config)
    tokens = batch([0])[0].expand(4000, S)
    block = model.blocks[0]
    with torch.no_grad():
        stream = model.embedding(tokens, samples=torch.arange(4000))
        dropped = block(stream).hidden - stream.hidden
        block.eval()
        plain = (block(stream).hidden - stream.hidden)[0]
    error = dropped.std(0) / 4000**0.5
    assert ((dropped.mean(0) - plain).abs() < 5 * error + 1e-7).all() and dropped.std(0).min() > 0
