"""A core of blocks that is repeated: its authors' model, truncated gradients, draws, decoding, counts, text."""

from __future__ import annotations

import math
import statistics
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import resolve
from megatron.config.arithmetic.recurrence import Passes, expected_passes, passes_of_step
from megatron.config.pattern import PatternError, parse
from megatron.config.sections.model import RecurrenceOptions
from megatron.decoding.one_text import generate
from megatron.decoding.sampling import Sampling
from megatron.model.costs.describe import flops_of_step, layers, totals
from megatron.model.stack import build_model
from megatron.testing import check_counts
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named, randomise, relative

H, HEADS, WIDTH, V, S = 24, 4, 40, 37, 11
MODEL = {
    "layers": "(attention/mlp) x2 recurrent(attention/mlp x2) (attention/mlp)",
    "hidden_size": H,
    "vocab_size": V,
    "norm": {"type": "rmsnorm", "epsilon": 1e-6},
    "residual": {"norm": "sandwich"},
    "embedding": {"tied": True, "multiplier": math.sqrt(H)},
    "attention": {"heads": HEADS, "qkv_bias": True, "rotary": {"base": 50000.0}},
    "mlp": {"gated": True, "activation": "silu", "hidden_size": WIDTH},
    "mamba2": {"head_dim": 12, "state_size": 6, "chunk": 11},
    "recurrence": {"mean": 4, "backward": 2},
}


def built(**changes):
    values = {"model": {**MODEL, **changes}, "training": {"steps": 9, "sequence_length": S, "seed": 5}}
    model = build_model(resolve(values), dtype=DOUBLE)
    randomise(model, 3)
    return model


def some_tokens(rows: int = 3) -> torch.Tensor:
    return torch.randint(V, (rows, S + 1), generator=torch.Generator().manual_seed(1))


class Raven:
    """The authors' minimal model, written again from its description. Rotation is of neighbouring channels there, and
    of halves here: `weave` puts the rows of our queries and keys into their order.
    """

    def __init__(self, model):
        self.w = {name: value.detach().clone().requires_grad_() for name, value in named(model).items()}

    @staticmethod
    def weave(rows: torch.Tensor) -> torch.Tensor:
        first, second = rows.unflatten(0, (HEADS, 2, -1)).unbind(1)
        return torch.stack([first, second], 2).flatten(0, 2)

    @staticmethod
    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    def rotated(self, x):
        half = x.shape[-1] // 2
        frequency = 50000.0 ** -(torch.arange(half, dtype=DOUBLE) / half)
        turns = torch.polar(torch.ones(S, half, dtype=DOUBLE), torch.outer(torch.arange(S).double(), frequency))
        pairs = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
        return torch.view_as_real(pairs * turns[:, None]).flatten(-2)

    def block(self, index, x):
        w = {name.removeprefix(f"layers.{index}."): each for name, each in self.w.items()}
        k_weight, v_weight = w["attention.key_value.weight"].chunk(2)
        k_bias, v_bias = w["attention.key_value.bias"].chunk(2)
        y = self.norm(x, w["mixer_norm.weight"])
        q = F.linear(y, self.weave(w["attention.query.weight"]), self.weave(w["attention.query.bias"]))
        k = F.linear(y, self.weave(k_weight), self.weave(k_bias))
        v = F.linear(y, v_weight, v_bias)
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in (q, k, v))
        q, k = self.rotated(q), self.rotated(k)
        mixed = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        x = self.norm(
            x + F.linear(mixed.transpose(1, 2).flatten(2), w["attention.output.weight"]), w["mixer_output_norm.weight"]
        )
        y = self.norm(x, w["ffn_norm.weight"])
        gate, up = F.linear(y, w["mlp.gate_up.weight"]).chunk(2, -1)
        return self.norm(x + F.linear(F.silu(gate) * up, w["mlp.down.weight"]), w["ffn_output_norm.weight"])

    def logits(self, tokens, state, without, backward):
        e = F.embedding(tokens, self.w["embedding.tokens.weight"]) * math.sqrt(H)
        for index in (0, 1):
            e = self.block(index, e)

        def once(s):
            x = F.linear(torch.cat([s, e], -1), self.w["layers.2.injection.weight"])
            return self.block(3, self.block(2, x))

        s = state
        with torch.no_grad():
            for _ in range(without):
                s = once(s)
        for _ in range(backward):
            s = once(s)
        x = self.block(4, self.norm(s, self.w["final_norm.weight"]))
        return F.linear(self.norm(x, self.w["final_norm.weight"]), self.w["embedding.tokens.weight"])


@pytest.mark.parametrize("step", [None, 0, 1, 3])
def test_the_authors_model(step: int | None):
    """Logits, loss and gradients, in training steps of different depths and in evaluation."""
    model, both = built(), some_tokens()
    tokens, labels = both[:, :-1], both[:, 1:]
    model.train(step is not None)
    model.plan.depth.step = step
    passes = model.plan.depth.passes(model.training)
    samples = torch.tensor([4, 5, 9]) if model.training else None
    assert passes == (Passes(2, 2) if step is None else passes_of_step(model.plan.config.model.recurrence, 5, step))
    state = model.core.start(model.embedding(tokens, samples=samples), model.training, 0).detach()
    theirs = Raven(model)
    wanted = theirs.logits(tokens, state, passes.without, passes.backward)
    found = model.head.logits(model.stream(tokens, samples=samples))
    assert relative(found, wanted) < EXACT
    losses = [F.cross_entropy(each.flatten(0, 1), labels.flatten()) for each in (found, wanted)]
    for loss in losses:
        loss.backward()
    assert relative(*losses) < EXACT
    parameters = dict(zip(named(model), dict.fromkeys(model.parameters())))
    assert set(theirs.w) == set(named(model)) and len(parameters) == len(theirs.w)
    for name, gradient in gradients(model).items():
        assert relative(gradient, theirs.w[name].grad) < EXACT, name


def gradients(model) -> dict[str, torch.Tensor]:
    found = {each.logical.name: each.grad for each in dict.fromkeys(model.parameters())}
    assert all(each is not None and each.abs().sum() > 0 for each in found.values())
    return found


def test_the_draws_are_the_papers_and_the_steps():
    """Against the moments of the distribution, and step by step against nothing but the seed and the number."""
    options = RecurrenceOptions(mean=8, backward=4)
    drawn = [passes_of_step(options, 1, step) for step in range(4000)]
    totals_, mean = [each.total for each in drawn], expected_passes(options)
    variance = 8 + 8**2 * (math.exp(0.25) - 1)  # of a Poisson whose rate is log-normal
    error = math.sqrt(variance / len(drawn))
    assert abs(statistics.mean(totals_) - 9) < 4 * error and min(totals_) >= 1
    assert statistics.variance(totals_) == pytest.approx(variance, rel=0.15)
    assert mean.total == 9
    backward = [each.backward for each in drawn]
    assert abs(statistics.mean(backward) - mean.backward) < 4 * statistics.stdev(backward) / math.sqrt(len(drawn))
    assert max(backward) == 4 and all(each.without == max(0, each.total - 4) for each in drawn)
    assert drawn[:50] == [passes_of_step(options, 1, step) for step in range(50)]
    assert drawn[:50] != [passes_of_step(options, 2, step) for step in range(50)]
    fixed = RecurrenceOptions(sampling="fixed", mean=6, backward=4)
    assert passes_of_step(fixed, 1, 7) == expected_passes(fixed) == Passes(2, 4)


def test_the_initial_state_is_a_truncated_normal_of_seed_sample_and_position():
    model = built()
    stream = model.embedding(torch.zeros(8, 512, dtype=torch.int64), samples=torch.arange(8))
    start, std = model.core.start, model.plan.config.model.recurrence.state_std
    state = start(stream, True, 0) / std
    assert std == pytest.approx(math.sqrt(H) * math.sqrt(2 / (5 * H)))
    assert state.abs().max() <= 3 and state.numel() == 98304
    normal = NormalDist()
    for at in (-2.0, -1.0, 0.0, 0.5, 1.5):
        inside = (normal.cdf(at) - normal.cdf(-3)) / (normal.cdf(3) - normal.cdf(-3))
        assert abs(float((state < at).double().mean()) - inside) < 4 * math.sqrt(0.25 / state.numel())
    assert torch.equal(
        state[3:5],
        start(
            model.embedding(stream.documents or torch.zeros(2, 512, dtype=torch.int64), samples=torch.tensor([3, 4])),
            True,
            0,
        )
        / std,
    )
    told = start(stream, False, 0)
    assert torch.equal(told[0], told[7]) and torch.equal(
        start(stream.with_hidden(stream.hidden[:, :9]), False, 3), told[:, 3:12]
    )


@pytest.mark.parametrize("layers", [MODEL["layers"], "recurrent(mamba2 attention/mlp)"])
def test_decoding_and_counts(layers: str):
    model = built(layers=layers).eval()
    tokens = some_tokens()[:, :S]
    with torch.no_grad(), model.plan.depth.at(5):
        state = model.new_state()
        pieces = [model.decode(part, state, begin) for part, begin in zip(tokens.split([4, 1, 1, 5], 1), (0, 4, 5, 6))]
        assert relative(torch.cat(pieces, 1), model.logits(tokens)) < EXACT
        assert model.plan.depth.taken == 5
    check_counts({"model": {**MODEL, "layers": layers}, "training": {"steps": 1, "sequence_length": S}})


def test_flops_of_steps_are_those_of_their_passes():
    """FLOPs by torch's count of a forward and a backward pass, for steps of different depths."""
    model, both = built(attention={"heads": HEADS}), some_tokens()
    config, tokens = model.plan.config, both[:, :-1]
    for step in (0, 1, 2, 3):
        model.plan.depth.step = step
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            stream = model.stream(tokens, samples=torch.arange(3))
            model.head.logits(stream).sum().backward()
        said = flops_of_step(config, totals(config), step)
        assert abs(counter.get_total_flops() / tokens.numel() - said) <= 1  # the mean is rounded
    rows = layers(config)
    assert rows[3].saved > 1.5 * rows[2].saved and rows[3].counts.flops > 3 * rows[2].counts.flops


def test_text_of_a_chosen_and_of_an_adaptive_depth():
    """A depth that is reached by tolerance gives the text of that depth. No tolerance, that of all passes."""
    model, prompt = built().eval(), some_tokens(1)[:, :5]
    greedy = Sampling(temperature=0.0)

    def text(**options) -> list[int]:
        return [int(each) for each in generate(model, prompt, 6, greedy, **options)]

    assert text(depth=3) == text(depth=3, cache=False) != text(depth=1)
    assert text(depth=7, tolerance=0.0) == text(depth=7) and model.plan.depth.taken == 7
    assert text(depth=50, tolerance=1e9) == text(depth=1) and model.plan.depth.taken == 1
    assert model.plan.depth.chosen is None and model.plan.depth.tolerance is None


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        ("(recurrent(mlp)) x2", "inside no other group"),
        ("recurrent(mlp) mlp recurrent(mlp)", "one recurrent group"),
        ("recurrent(mlp) x3", "drawn in each step"),
        ("recurrent(mlp", "never closed"),
        ("recurrent()", "a block is expected"),
    ],
)
def test_patterns_that_cannot_be(pattern: str, rule: str):
    with pytest.raises(PatternError, match=rule):
        parse(pattern)


def test_the_pattern_marks_the_core():
    blocks = parse("mlp recurrent((attention/mlp) x2 mlp) attention")
    assert [block.recurrent for block in blocks] == [False, True, True, True, False]
    assert str(blocks[1]) == "recurrent(attention/mlp)"


def test_the_published_size():
    """3,564,976,800 parameters, and 8 H biases of values that ours has besides."""
    model = {
        **MODEL,
        "layers": "(attention/mlp) x2 recurrent(attention/mlp x4) (attention/mlp) x2",
        **{"hidden_size": 5280, "vocab_size": 65536, "recurrence": {}},
        "attention": {"heads": 55, "qkv_bias": True},
        "mlp": {"gated": True, "activation": "silu", "hidden_size": 17920},
    }
    config = resolve({"model": model, "training": {"steps": 1, "sequence_length": 4096}})
    assert totals(config).parameters == 3_564_976_800 + 8 * 5280 and config.model.init.layers == 132
