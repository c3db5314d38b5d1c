"""Gated DeltaNet and compressed convolutional attention: recurrences in float64, transformers' layers, values at the
start.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.models.zaya.modeling_zaya import ZayaAttention, ZayaRotaryEmbedding

from megatron.config import resolve
from megatron.kinds.common.recurrence import decays
from megatron.kinds.gated_delta import householders
from megatron.kinds.gated_delta import kernels as delta_kernels
from megatron.kinds.gated_delta.delta_rule import LENGTH_EPSILON, gated_delta_rule
from megatron.model.costs.describe import layers
from megatron.model.stack import build_model
from megatron.model.stream import Stream
from tests.float64 import DOUBLE, EXACT, wider
from tests.kinds.common.test_scans import Bs, S, check, draw, places, stacked, starts_of
from tests.model.parity import named, randomise, relative
from tests.model.recurrences import delta_head
from tests.selection import covering

H = 24


def mixer_of(layers: str, **section):
    """The mixer of the only block, all parameters drawn."""
    config = resolve({
        "model": {"layers": layers, "hidden_size": H, "vocab_size": 11, "norm": {"type": "rmsnorm"}, layers: section},
        "training": {"steps": 1, "sequence_length": S},
    })
    mixer = build_model(config, dtype=DOUBLE).blocks[0].mixer
    return mixer, {name.split(".", 3)[-1]: p for name, p in named(mixer).items()}, config


# "fast": a chunk forgets all but its last tokens. "slow": hardly anything, so that written keys pile up.
@pytest.mark.parametrize("decay", [1.0, 30.0, 1e-3], ids=["plain", "fast", "slow"])
@pytest.mark.parametrize("documents", [None, "none", "all", "one"])
@pytest.mark.parametrize("by", ["head", "channel"])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_delta_rule(chunk: int, by: str, documents: str | None, decay: float, monkeypatch):
    """A chunk has several pieces, between which decays of channels are factors of matrices."""
    monkeypatch.setattr(decays, "PIECE", 4)
    g, h, K, V = 2, 4, 3, 5
    shape = (Bs, S, h) if by == "head" else (Bs, S, h, K)
    inputs = [
        draw(Bs, S, g, K, seed=0),
        draw(Bs, S, g, K, seed=1),
        draw(Bs, S, h, V, seed=2),
        -decay * torch.rand(*shape, generator=torch.Generator().manual_seed(3)),
        2 * torch.rand(Bs, S, h, generator=torch.Generator().manual_seed(4)),
        draw(Bs, h, K, V, seed=5),
    ]
    starts = starts_of(documents)

    def scan(*leaves):
        return gated_delta_rule(*leaves[:5], chunk=chunk, initial_BhKV=leaves[5], starts_BS=starts)

    def recurrence(q, k, v, rate, beta, initial):
        q, k = (each / (each.square().sum(-1, keepdim=True) + LENGTH_EPSILON).sqrt() for each in (q, k))
        each = [
            [
                delta_head(
                    q[b, :, i // 2] / math.sqrt(K),
                    k[b, :, i // 2],
                    v[b, :, i],
                    rate[b, :, i],
                    beta[b, :, i],
                    initial[b, i],
                    places(starts, b),
                )
                for i in range(h)
            ]
            for b in range(Bs)
        ]
        return stacked(each)

    check(scan, recurrence, inputs, ["q", "k", "v", "decay", "beta", "initial"])


# Chunks that begin between two updates of a token, and one for all.
@pytest.mark.parametrize(("chunk", "documents", "count"), covering([4, 64], [None, "one"], [2, 3]))
def test_delta_product(count: int, documents: str | None, chunk: int):
    """Siems et al. 2025, section 3: a token's transition is exp(d) times the product of (I - b_j k_j k_j^T), and each
    b_j v_j k_j^T passes through the later ones."""
    h, K, V = 2, 3, 5
    inputs = [
        draw(Bs, S, h, K, seed=0),
        *(draw(Bs, S, h, K, seed=1 + j) for j in range(count)),
        *(draw(Bs, S, h, V, seed=11 + j) for j in range(count)),
        -torch.rand(Bs, S, h, generator=torch.Generator().manual_seed(3)),
        2 * torch.rand(Bs, S, count * h, generator=torch.Generator().manual_seed(4)),
    ]
    starts = starts_of(documents)

    def scan(q, *rest):
        k, v, (decay, beta) = rest[:count], rest[count : 2 * count], rest[2 * count :]
        *steps_of, begins = householders.steps(q, k, v, decay, beta, starts)
        y, state = gated_delta_rule(*steps_of, chunk=chunk, starts_BS=begins)
        return householders.read(y, count), state

    def equations(q, *rest):
        k, v, (decay, beta) = rest[:count], rest[count : 2 * count], rest[2 * count :]
        q, *k = (each / (each.square().sum(-1, keepdim=True) + LENGTH_EPSILON).sqrt() for each in (q, *k))
        one, found = torch.eye(K, dtype=DOUBLE), []
        for b in range(Bs):
            found.append([])
            for i in range(h):
                state, rows, begins = torch.zeros(V, K, dtype=DOUBLE), [], places(starts, b)
                for t in range(S):
                    if begins[t] == t:
                        state = torch.zeros_like(state)
                    turn, added = torch.exp(decay[b, t, i]) * one, torch.zeros_like(state)
                    for j in range(count):
                        key, share = k[j][b, t, i], beta[b, t, j * h + i]
                        reflection = one - share * torch.outer(key, key)
                        turn = turn @ reflection
                        added = added @ reflection + share * torch.outer(v[j][b, t, i], key)
                    state = state @ turn + added
                    rows.append(state @ q[b, t, i] / math.sqrt(K))
                found[-1].append((torch.stack(rows), state.T))
        return stacked(found)

    keys = [f"{name} {j}" for name in "kv" for j in range(count)]
    check(scan, equations, inputs, ["q", *keys, "decay", "beta"])


@pytest.mark.parametrize("dtype, bound", [(DOUBLE, EXACT), (torch.float32, 1e-3)], ids=["float64", "fp32"])
def test_equal_keys_do_not_blow_up(dtype: torch.dtype, bound: float):
    """A thousand times the same key with beta near 2 turns the state's sign at each token: nothing may grow.

    A thousand roundings of fp32 add up to about 1e-4 of the state.
    """
    tokens = 1000
    k = draw(1, 1, 1, 8, seed=1).expand(1, tokens, 1, 8).contiguous()
    v, beta = draw(1, tokens, 1, 8, seed=2), torch.full((1, tokens, 1), 1.99)
    k, v, beta = (each.to(dtype) for each in (k, v, beta))
    y, state = gated_delta_rule(k, k, v, torch.zeros(1, tokens, 1, dtype=dtype), beta, chunk=64)
    key = (k / (k.square().sum(-1, keepdim=True) + LENGTH_EPSILON).sqrt()).double()[0, :, 0]
    wanted, last = delta_head(
        key / math.sqrt(8),
        key,
        v[0, :, 0].double(),
        torch.zeros(tokens),
        beta[0, :, 0].double(),
        torch.zeros(8, 8).double(),
        [-1] * tokens,
    )
    assert relative(y[0, :, 0].double(), wanted) < bound and relative(state[0, 0].double(), last) < bound


def compared(mixer, forward, theirs: torch.nn.Module, pairs: dict[str, torch.Tensor]) -> None:
    """Equal outputs and gradients. `pairs` has our parameters' gradients as made of theirs, by name."""
    x = draw(2, S, H, seed=1).to(DOUBLE)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, weights = mixer(mine, Stream(mine)), draw(*x.shape, seed=2).to(DOUBLE)
    (y * weights).sum().backward()
    with wider():
        wanted = forward(other)
        (wanted * weights).sum().backward()
    assert relative(y, wanted) < EXACT and relative(mine.grad, other.grad) < EXACT
    ours, found = named(mixer), pairs({name: p.grad for name, p in theirs.named_parameters()})
    assert {name.split(".", 3)[-1] for name in ours} == set(found)
    for name, p in ours.items():
        gradient = found[name.split(".", 3)[-1]]
        assert gradient.abs().max() > 0 and relative(p.grad, gradient) < EXACT, name


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_qwen3_next_layer(key_heads: int):
    """Its projections are fused by heads of keys: q, k, v and z of the first, then of the next. Beta before decay."""
    heads, K, V = 4, 6, 8
    config = hf.Qwen3NextConfig(
        hidden_size=H,
        linear_num_value_heads=heads,
        linear_num_key_heads=key_heads,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        rms_norm_eps=1e-4,
        num_hidden_layers=4,
    )
    theirs = Qwen3NextGatedDeltaNet(config, 0).double()
    randomise(theirs, 3)
    mixer, ours, _ = mixer_of(
        "gated_delta", heads=heads, key_heads=key_heads, key_dim=K, value_dim=V, norm_epsilon=1e-4, chunk=8
    )

    def pairs(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        share = heads // key_heads
        q, k, v, z = t["in_proj_qkvz.weight"].unflatten(0, (key_heads, -1)).split([K, K, share * V, share * V], 1)
        b, a = t["in_proj_ba.weight"].unflatten(0, (key_heads, -1)).split([share, share], 1)
        qk, value = t["conv1d.weight"].split([2 * key_heads * K, heads * V])
        return {
            "query_key.weight": torch.cat([q.flatten(0, 1), k.flatten(0, 1)]),
            "value_gate.weight": torch.cat([v.flatten(0, 1), z.flatten(0, 1)]),
            "decay_beta.weight": torch.cat([a.flatten(0, 1), b.flatten(0, 1)]),
            "query_key_conv.weight": qk,
            "value_conv.weight": value,
            "A_log": t["A_log"],
            "dt_bias": t["dt_bias"],
            "norm.weight": t["norm.weight"],
            "output.weight": t["out_proj.weight"],
        }

    with torch.no_grad():
        for name, value in pairs(dict(theirs.named_parameters())).items():
            ours[name].copy_(value)
    compared(mixer, theirs, theirs, pairs)


@pytest.mark.parametrize(
    "heads, kv_heads, bias, taps, fraction",
    [(4, 2, False, (2, 2), 0.5), (4, 4, True, (3, 4), 1.0), (6, 1, True, (2, 3), 0.5), (6, 3, False, (4, 1), 0.5)],
)
def test_zaya_attention(heads: int, kv_heads: int, bias: bool, taps: tuple[int, int], fraction: float):
    """With one or three key/value heads the delayed values begin inside a head."""
    D = 8
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": fraction}
    config = hf.ZayaConfig(
        hidden_size=H,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=D,
        attention_bias=bias,
        cca_time0=taps[0],
        cca_time1=taps[1],
        num_hidden_layers=1,
        rope_parameters={"hybrid": rope},
    )
    config._attn_implementation = "eager"
    theirs = ZayaAttention(config, 0).double()
    randomise(theirs, 4)
    mixer, ours, _ = mixer_of(
        "cca",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=D,
        qkv_bias=bias,
        output_bias=bias,
        depthwise=taps[0],
        grouped=taps[1],
        temperature="linear",
        rotary={"base": 500.0, "fraction": fraction},
    )

    def pairs(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {"temperature": t["qk_norm.temp"]}
        for part in ("weight", "bias"):
            q, k, now, later = (
                t.get(f"qkv_proj.{each}.{part}") for each in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
            )
            if q is not None:
                found |= {
                    f"query_key.{part}": torch.cat([q, k]),
                    f"value.{part}": torch.cat([now, later]),
                    f"output.{part}": t[f"o_proj.{part}"],
                }
            found |= {f"{each}.{part}": t[f"qkv_proj.conv_qk_{each}.{part}"] for each in ("depthwise", "grouped")}
        return found

    with torch.no_grad():
        for name, value in pairs(dict(theirs.named_parameters())).items():
            ours[name].copy_(value)
    with wider():
        angles = ZayaRotaryEmbedding(config)(torch.zeros(1), torch.arange(S).unsqueeze(0), "hybrid")
        mask = torch.full((S, S), float("-inf")).triu(1)[None, None]
    compared(mixer, lambda x: theirs(x, {"causal": mask}, position_embeddings=angles)[0], theirs, pairs)


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    """The contract of flash-linear-attention's function: all [1 or B, T, heads, ...], with the same number of heads."""
    assert (
        use_qk_l2norm_in_kernel
        and q.shape[2] == v.shape[2]
        and all(each.is_contiguous() for each in (q, k, v, g, beta))
    )
    assert cu_seqlens is None or (q.shape[0] == 1 and cu_seqlens.dtype == torch.int64)
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    starts = [-1] * q.shape[1]
    for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:]) if cu_seqlens is not None else ():
        starts[begin:end] = [int(begin)] * int(end - begin)
    zero = torch.zeros(q.shape[-1], v.shape[-1], dtype=v.dtype)
    y = [
        [
            delta_head(scale * q[b, :, i], k[b, :, i], v[b, :, i], g[b, :, i], beta[b, :, i], zero, starts)[0]
            for i in range(q.shape[2])
        ]
        for b in range(q.shape[0])
    ]
    return torch.stack([torch.stack(each, 1) for each in y]), None


@pytest.mark.parametrize("documents", [None, "none"])
def test_the_adapter_hands_over_what_the_package_documents(documents: str | None, monkeypatch):
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(
        sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", chunk_gated_delta_rule, False
    )
    inputs = [
        draw(Bs, S, 2, 3, seed=0),
        draw(Bs, S, 2, 3, seed=1),
        draw(Bs, S, 4, 5, seed=2),
        -draw(Bs, S, 4, seed=3).abs(),
        draw(Bs, S, 4, seed=4).sigmoid(),
    ]
    starts = starts_of(documents)
    inputs = [each.to(DOUBLE) for each in inputs]
    wanted, _ = gated_delta_rule(*inputs, chunk=8, starts_BS=starts)
    monkeypatch.setattr(delta_kernels.delta_rule, "gated_delta_rule", None)
    found, _ = delta_kernels.gated_delta_rule(*inputs, chunk=8, starts_BS=starts)
    assert relative(found, wanted) < EXACT


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("documents", [None, "none"])
def test_kernels_equal_torch(documents: str | None):
    """In bf16, outputs and gradients."""
    pytest.importorskip("fla")
    shapes = [(Bs, S, 2, 32), (Bs, S, 2, 32), (Bs, S, 4, 64)]
    inputs = [draw(*shape, seed=i).cuda().bfloat16() for i, shape in enumerate(shapes)]
    inputs += [-draw(Bs, S, 4, seed=3).abs().cuda(), draw(Bs, S, 4, seed=4).sigmoid().cuda()]
    starts, results = starts_of(documents), []
    for rule in (gated_delta_rule, delta_kernels.gated_delta_rule):
        own = [each.clone().requires_grad_() for each in inputs]
        y, _ = rule(*own, chunk=64, starts_BS=None if starts is None else starts.cuda())
        (y.float() * draw(*y.shape, seed=9).cuda()).sum().backward()
        results.append([y.detach(), *(each.grad for each in own)])
    for wanted, found in zip(*results):
        assert relative(found.float(), wanted.float()) < 2e-2


def test_the_two_temperatures():
    """exp(t) of the paper is the t of the released models."""
    one, paper, _ = mixer_of("cca", heads=4, kv_heads=2, head_dim=6)
    two, released, _ = mixer_of("cca", heads=4, kv_heads=2, head_dim=6, temperature="linear")
    assert (paper["temperature"] == 0).all() and (released["temperature"] == 1).all()
    randomise(one, 5)
    with torch.no_grad():
        for name, p in released.items():
            p.copy_(paper[name].exp() if name == "temperature" else paper[name])
    x = draw(1, S, H, seed=6).to(DOUBLE)
    assert relative(one(x, Stream(x)), two(x, Stream(x))) < EXACT
    assert relative(one(x, Stream(x)), mixer_of("cca", heads=4, kv_heads=2, head_dim=6)[0](x, Stream(x))) > 0.1


@pytest.mark.parametrize("window", [None, 7])
def test_decoding_state_of_cca(window: int | None):
    """Compressed keys and values, the taps of both convolutions, and half of the last token's values."""
    mixer, _, config = mixer_of("cca", heads=4, kv_heads=2, head_dim=6, depthwise=3, window=window)
    state = mixer.new_state()
    with torch.no_grad():
        x = draw(1, S, H, seed=1).to(DOUBLE)
        mixer(x, Stream(x), state)
    fixed = state.query_key[0].numel() + state.value[0].numel()
    seen = min(window or S, S)
    assert layers(config)[1].counts.state == fixed + 2 * state.cache.keys[0, :, :seen].numel()


def test_initial_values_are_the_published_ones():
    config = resolve({
        "model": {
            "layers": "gated_delta cca",
            "hidden_size": 256,
            "vocab_size": 11,
            "gated_delta": {"heads": 512, "key_dim": 2, "value_dim": 2},
            "cca": {"heads": 16, "kv_heads": 4, "head_dim": 8},
        },
        "training": {"steps": 1, "sequence_length": S},
    })
    weights = {name: p.detach() for name, p in named(build_model(config)).items()}
    rates, steps = weights["layers.0.gated_delta.A_log"].exp(), F.softplus(weights["layers.0.gated_delta.dt_bias"])
    assert 0 < rates.min() < 0.2 and 15.8 < rates.max() <= 16.01 and abs(rates.mean() - 8) < 0.8
    assert 0.001 <= steps.min() < 0.00105 and 0.095 < steps.max() <= 0.1001
    assert abs(((steps.log() - math.log(0.001)) / math.log(100)).mean() - 0.5) < 0.04
    assert (weights["layers.0.gated_delta.norm.weight"] == 1).all()
    for name, limit in (
        ("layers.0.gated_delta.value_conv", 0.5),
        ("layers.1.cca.depthwise", 2**-0.5),
        ("layers.1.cca.grouped", 0.25),
    ):
        values = weights[f"{name}.weight"]
        assert 0.97 * limit < values.abs().max() <= limit and abs(values.std() / limit - 3**-0.5) < 0.05, name
    assert (weights["layers.1.cca.temperature"] == 0).all()
