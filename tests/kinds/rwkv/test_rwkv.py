"""RWKV layers: decoding, hand-over between pieces, documents, recomputation, counts, tensor parallel ranks, starts."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import resolve
from megatron.engine.optimizers.groups import parameter_groups
from megatron.model.costs.describe import layers, layers_table, totals
from megatron.model.stack import build_model
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from tests.float64 import DOUBLE, EXACT
from tests.kinds.rwkv.test_rwkv_parity import randomised
from tests.model.documents import check_documents
from tests.model.parity import check_part, named, own_part, relative
from tests.model.test_recomputation import Allocations
from tests.selection import covering
from tests.workers import run

S, V, H = 24, 37, 24
RANKS7 = {"decay_rank": 3, "rate_rank": 4, "value_rank": 2, "gate_rank": 5}
MODELS = {
    "rwkv4": {"layers": "(rwkv4/rwkv4_ffn) x2", "rwkv4": {"chunk": 9}},
    "rwkv5": {"layers": "(rwkv5/rwkv5_ffn) x2", "rwkv5": {"head_dim": 12, "chunk": 9}},
    "rwkv6": {"layers": "(rwkv6/rwkv6_ffn) x2", "rwkv6": {"head_dim": 12, "chunk": 10, "mix_rank": 3, "decay_rank": 4}},
    "rwkv7": {"layers": "(rwkv7/rwkv7_ffn) x3", "rwkv7": {"head_dim": 6, "chunk": 8, **RANKS7}},
    "mixed": {
        "layers": "attention/mlp rwkv7/mlp rwkv7@wide/rwkv7_ffn mlp rwkv7_ffn",
        "rwkv7": {"head_dim": 3, "chunk": 5, **RANKS7},
        "attention": {"heads": 4},
        "mlp": {"hidden_size": 32},
        "variants": {"wide": {"head_dim": 6, "value_rank": 7}},
    },
}


def values_of(name: str, **model) -> dict:
    return {"hidden_size": H, "vocab_size": V, "embedding": {"norm": True}, **MODELS[name], **model}


def config_of(name: str, documents: bool = False, model: dict | None = None, **training):
    return resolve({
        "model": values_of(name, **(model or {})),
        "data": {"reset_attention_at_eod": documents},
        "training": {"steps": 1, "sequence_length": S, **training},
    })


def tokens_of(samples: int = 2, length: int = S, seed: int = 1) -> torch.Tensor:
    return torch.randint(V, (samples, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("pieces", "name"), covering([[24], [1] * 24, [5, 1, 1, 1, 16]], MODELS, every=2))
def test_decoding_in_pieces_equals_the_whole(name: str, pieces: list[int]):
    model = build_model(config_of(name), dtype=DOUBLE).eval()
    randomised(model, 2)
    tokens = tokens_of()
    with torch.no_grad():
        wanted, state, begin, found = model.logits(tokens), model.new_state(), 0, []
        for piece in pieces:
            found.append(model.decode(tokens[:, begin : begin + piece], state, begin))
            begin += piece
    assert relative(torch.cat(found, 1), wanted) < EXACT


@pytest.mark.parametrize(
    ("documents", "cuts", "name"),
    covering([False, True], [(1, 2, 17), (8, 16)], [name for name in MODELS if name != "mixed"]),
)
def test_states_hand_over_with_their_gradients(name: str, cuts: tuple[int, ...], documents: bool):
    """The blocks over pieces of a sequence, each continued from the state of the last, give the outputs and the
    gradients of the whole."""
    model = build_model(config_of(name, documents), dtype=DOUBLE)
    randomised(model, 3)
    numbers = torch.tensor([[0] * 5 + [1] * 7 + [2] * 12, [0] * 13 + [1] * 11]) if documents else None

    def outputs(bounds) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        state, parts = model.new_state(), []
        for begin, end in zip(bounds, bounds[1:]):
            stream = model.embedding(
                tokens_of()[:, begin:end], documents=None if numbers is None else numbers[:, begin:end]
            )
            for block, own in zip(model.blocks, state):
                stream = block(stream, own)
            parts.append(stream.hidden)
        y = torch.cat(parts, 1)
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
        return y.detach(), {key: p.grad for key, p in named(model).items() if p.grad is not None}

    whole, gradients = outputs([0, S])
    plain = model.stream(tokens_of(), documents=numbers).hidden.detach()
    assert relative(plain, whole) < EXACT  # a state changes nothing
    found, own = outputs([0, *cuts, S])
    assert relative(found, whole) < EXACT
    for key in gradients:
        assert relative(own[key], gradients[key]) < EXACT, key


@pytest.mark.parametrize("name", MODELS)
def test_documents_do_not_see_each_other(name: str):
    model = build_model(config_of(name, documents=True), dtype=DOUBLE)
    randomised(model, 0)
    check_documents(model, tokens_of(), tokens_of(seed=7))


@pytest.mark.parametrize(("mode", "name"), covering(["selective", "full"], MODELS))
def test_recomputing_a_block_changes_no_bit(name: str, mode: str):
    def gradients(mode: str):
        model = build_model(config_of(name, activation_checkpointing={"mode": mode}))
        randomised(model, 4)
        model(tokens_of(), tokens_of(seed=2), torch.ones(2, S))[0].backward()
        return {key: p.grad for key, p in named(model).items()}

    wanted, found = gradients("none"), gradients(mode)
    assert all(found[key].equal(wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", MODELS)
def test_counts_of_parameters_and_flops(name: str):
    """FLOPs are what torch counts, with chunks that divide the sequence."""
    own = {
        kind: {**MODELS[name][kind], "chunk": 8}
        for kind in MODELS[name]
        if kind.startswith("rwkv") and "ffn" not in kind
    }
    config = config_of(name, model=own)
    model = build_model(config).eval()
    for block, row in zip(model.blocks, layers_table(config)[1:-1]):
        assert row["parameters"] == sum(p.numel() for p in block.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            model.logits(tokens_of())
    assert counter.get_total_flops() == totals(config).forward_flops * 2 * S


@pytest.mark.parametrize(
    ("name", "mode"), covering([name for name in MODELS if name != "mixed"], ["none", "full", "selective"])
)
def test_activations_kept_by_a_block(name: str, mode: str):
    """Bytes that exist between forward and backward: what one more block adds. Scans by pieces also keep one fp32
    state per piece."""

    def kept(blocks: int) -> tuple[int, int]:
        own = {**MODELS[name][name], "chunk": 8}
        config = resolve({
            "model": values_of(name, layers=f"({name}/{name}_ffn) x{blocks}", **{name: own}),
            "training": {"steps": 1, "sequence_length": 64, "activation_checkpointing": {"mode": mode}},
        })
        model = build_model(config)
        with Allocations(model.parameters()) as allocations:
            loss, _ = model(tokens_of(length=64), tokens_of(length=64, seed=2), torch.ones(2, 64))
        found = allocations.bytes()
        loss.backward()
        return found, layers(config)[blocks].saved

    (two, _), (three, row) = kept(2), kept(3)
    state = {"rwkv4": 3 * H, "rwkv5": 12 * H, "rwkv6": 12 * H, "rwkv7": 0}[name]
    pieces = 64 // 8 if mode == "none" else 0
    assert three - two == pytest.approx((row * 64 + pieces * state) * 2 * 4, rel=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_size_of_the_decoding_state(name: str):
    config = config_of(name)
    model, sizes = build_model(config).eval(), []
    for length in (S, S // 2):
        state = model.new_state()
        with torch.no_grad():
            model.decode(tokens_of(length=length), state, 0)
        sizes.append([
            sum(
                tensor[0].numel()
                for part in (own.mixer, own.ffn)
                if part is not None and type(part).__name__ != "KeyValueCache"
                for tensor in vars(part).values()
                if tensor is not None
            )
            for own in state
        ])
    assert sizes[0] == sizes[1]
    for size, block, row in zip(sizes[0], model.blocks, layers(config)[1:-1]):
        if "attention" not in str(block.pattern):
            assert size == row.counts.state


def step(name: str, layout: Layout, mode: str = "none"):
    """(loss, this rank's gradients by name with their spans, logits) on this rank of the layout."""
    mesh = Mesh.single() if layout.tensor == 1 else Mesh.build(layout)
    model = build_model(config_of(name, activation_checkpointing={"mode": mode}), mesh, dtype=DOUBLE)
    with torch.no_grad():
        for key, p in named(model).items():
            whole = torch.randn(p.logical.shape, generator=torch.Generator().manual_seed(sum(key.encode())))
            whole = own_part(whole, p.logical.spans(mesh.tensor.rank, mesh.tensor.size))
            p.add_(0.2 * whole)
    loss, _ = model(tokens_of(), tokens_of(seed=2), torch.ones(2, S))
    loss.backward()
    with torch.no_grad():
        logits = model.eval().logits(tokens_of())
    return (
        loss.item(),
        {key: (p.grad, p.logical.spans(mesh.tensor.rank, mesh.tensor.size)) for key, p in named(model).items()},
        logits,
    )


@cache
def whole(name: str) -> tuple:
    """The step of one rank, which several layouts are compared with."""
    return step(name, Layout())


@pytest.mark.parametrize("ranks, sequence, mode", [(2, False, "none"), (2, True, "selective")])
def test_heads_on_several_ranks_equal_one(ranks: int, sequence: bool, mode: str):
    for name in MODELS:
        answers = run(ranks, step, name, Layout(tensor=ranks, sequence=sequence), mode)
        for rank, own in enumerate(answers):
            check_part(own, whole(name), (name, rank))


STATES = {
    "rwkv4": {"decay", "bonus"},
    "rwkv5": {"decay", "bonus"},
    "rwkv6": {"decay", "bonus"},
    "rwkv7": {"decay_base", "rate_base", "blend_base", "key_scale", "rate_scale", "bonus"},
}


@pytest.mark.parametrize("name", STATES)
def test_in_bf16_decays_stay_in_fp32(name: str):
    """Their types, gradients of both types, and outputs that differ from fp32's by rounding to 8 bits."""
    config = config_of(name)
    exact, coarse = build_model(config), build_model(config, dtype=torch.bfloat16)
    randomised(exact, 1)
    with torch.no_grad():
        for key, p in named(coarse).items():
            p.copy_(named(exact)[key])
    kept = {key.split(".")[-1] for key, p in named(coarse).items() if p.dtype == torch.float32}
    assert kept == STATES[name]
    coarse(tokens_of(), tokens_of(seed=2), torch.ones(2, S))[0].backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() and p.grad.any() for p in coarse.parameters())
    with torch.no_grad():
        assert relative(coarse.logits(tokens_of()), exact.logits(tokens_of())) < 0.05


@pytest.mark.parametrize("name", STATES)
def test_decays_can_learn_at_a_rate_of_their_own(name: str):
    """Twice the rate only for the base of the decays, as in the authors' training code, and no weight decay."""
    model = build_model(config_of(name), device="meta")
    config = resolve({
        "model": values_of(name),
        "optimizer": {"groups": {"decay": {"lr_scale": 2.0}}},
        "training": {"steps": 1, "sequence_length": S},
    })
    groups = parameter_groups(config, model.parameters())
    faster = {
        p.logical.name: group["weight_decay"] for group in groups if group["lr_scale"] == 2.0 for p in group["params"]
    }
    base = "decay_base" if name == "rwkv7" else "decay"
    assert faster == {f"layers.{layer}.{name}.{base}": 0.0 for layer in range(len(model.blocks))}


@pytest.mark.parametrize("name", STATES)
def test_weight_decay_is_for_square_matrices(name: str):
    """And for embedding and head: neither for vectors and mixes nor for matrices of low rank."""
    config, model = config_of(name), build_model(config_of(name), device="meta")
    groups = parameter_groups(config, model.parameters())
    decayed = {p.logical.name for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    large = {key for key, p in named(model).items() if p.dim() == 2 and min(p.shape) >= H}
    assert decayed == large
