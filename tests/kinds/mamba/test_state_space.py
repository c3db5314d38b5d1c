"""Mixers with a state: decoding, hand-over between pieces, documents, counts, tensor parallel ranks, initial values."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import resolve
from megatron.engine.optimizers.groups import parameter_groups
from megatron.model.costs.describe import layers, layers_table, totals
from megatron.model.stack import build_model
from megatron.model.stream import Stream
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from tests.float64 import DOUBLE, EXACT
from tests.model.documents import check_documents
from tests.model.parity import check_part, named, own_part, randomise, relative
from tests.model.test_recomputation import Allocations
from tests.selection import covering, toured
from tests.workers import run

S, V = 24, 37
MODELS = {
    "mamba": {"layers": "mamba x2", "mamba": {"state_size": 4, "chunk": 10}},
    "mamba, biases": {
        "layers": "(mamba/mlp) x2",
        "mamba": {"bias": True, "convolution_bias": False, "convolution": 3, "rank": 5, "expand": 3},
        "mlp": {"hidden_size": 32},
    },
    "mamba, heads": {"layers": "mamba x2", "mamba": {"state_size": 4, "chunk": 10, "heads": 2, "bias": True}},
    "mamba, four heads, norms": {
        "layers": "mamba x2",
        "norm": {"type": "layernorm"},
        "mamba": {"state_size": 4, "chunk": 10, "heads": 4, "inner_norms": True, "rank": 6},
    },
    "mamba2": {"layers": "mamba2 x2", "mamba2": {"head_dim": 4, "state_size": 6, "groups": 2, "chunk": 8}},
    "mamba2, one group, biases": {
        "layers": "mamba2 x2",
        "mamba2": {
            "head_dim": 6,
            "state_size": 5,
            "bias": True,
            "convolution_bias": False,
            "most_step": 0.8,
            "least_step": 0.002,
        },
    },
    "mamba2, groups of two heads": {
        "layers": "mamba2 x2",
        "mamba2": {"head_dim": 4, "state_size": 5, "groups": 6, "chunk": 7},
    },
    "gated_delta": {
        "layers": "gated_delta x2",
        "gated_delta": {"heads": 4, "key_heads": 2, "key_dim": 5, "value_dim": 6, "chunk": 8},
    },
    "gated_delta, negative eigenvalues, biases": {
        "layers": "gated_delta x2",
        "gated_delta": {
            "heads": 8,
            "key_heads": 4,
            "convolution": 3,
            "convolution_bias": True,
            "negative_eigenvalues": True,
            "norm_epsilon": 0.01,
            "chunk": 6,
        },
    },
    "gated_delta, decays by channel": {
        "layers": "gated_delta x2",
        "gated_delta": {"heads": 4, "key_dim": 5, "value_dim": 6, "chunk": 8, "decay": "channel", "gate": "sigmoid"},
    },
    "gated_delta, three updates": {
        "layers": "gated_delta x2",
        "gated_delta": {"heads": 4, "key_heads": 2, "key_dim": 5, "value_dim": 6, "chunk": 8, "householders": 3},
    },
    "gated_delta, two updates, decays by channel": {
        "layers": "gated_delta x2",
        "gated_delta": {"heads": 4, "key_dim": 4, "value_dim": 6, "chunk": 8, "householders": 2, "decay": "channel"},
    },
    "lightning": {"layers": "lightning x2", "lightning": {"heads": 4, "chunk": 8}},
    "lightning, wide heads": {"layers": "lightning x2", "lightning": {"heads": 8, "head_dim": 5, "chunk": 8}},
    "cca": {"layers": "cca x2", "cca": {"heads": 8, "kv_heads": 4, "head_dim": 6}},
    "cca, biases, more taps": {
        "layers": "cca x2",
        "cca": {
            "heads": 4,
            "head_dim": 8,
            "depthwise": 3,
            "grouped": 4,
            "temperature": "linear",
            "rotary": {"fraction": 0.5},
            "qkv_bias": True,
            "output_bias": True,
        },
    },
    "mixed": {
        "layers": "mamba2 attention/mlp mamba mamba2/mlp",
        "attention": {"heads": 4},
        "mlp": {"hidden_size": 32},
        "mamba2": {"head_dim": 4, "state_size": 6, "groups": 4, "chunk": 5},
    },
    "zamba2": {
        "layers": "mamba2 mamba2+shared_attention mamba+shared_attention@few/mlp (mamba2+shared_attention) x2",
        "mlp": {"hidden_size": 32},
        "mamba2": {"head_dim": 4, "state_size": 6, "groups": 4, "chunk": 5},
        "shared_attention": {"heads": 4, "blocks": 2, "adapter_rank": 3, "attention_adapters": True, "kv_heads": 2},
        "variants": {"few": {"heads": 4, "kv_heads": 4, "adapter_rank": 0, "attention_adapters": False, "blocks": 1}},
    },
}
SINGLE = [name for name in MODELS if name not in ("mixed", "zamba2")]


def config_of(name: str, **training):
    documents = training.pop("documents", False)
    return resolve({
        "model": {"hidden_size": 24, "vocab_size": V, "norm": {"type": "rmsnorm"}, **MODELS[name]},
        "data": {"reset_attention_at_eod": documents},
        "training": {"steps": 1, "sequence_length": S, **training},
    })


def tokens_of(samples: int = 2, length: int = S, seed: int = 1) -> torch.Tensor:
    return torch.randint(V, (samples, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
def test_decoding_in_pieces_equals_the_whole(name: str):
    model = build_model(config_of(name), dtype=DOUBLE).eval()
    randomise(model, 2)
    tokens = tokens_of()
    with torch.no_grad():
        wanted = model.logits(tokens)
        for pieces in [24], [1] * 24, [5, 1, 1, 1, 16], [13, 11]:
            state, begin, found = model.new_state(), 0, []
            for piece in pieces:
                found.append(model.decode(tokens[:, begin : begin + piece], state, begin))
                begin += piece
            assert relative(torch.cat(found, 1), wanted) < EXACT, pieces


@pytest.mark.parametrize(("documents", "name"), covering([False, True], SINGLE))
def test_a_state_hands_over_with_its_gradients(name: str, documents: bool):
    """A mixer over pieces of a sequence gives the outputs and the gradients of the whole."""
    block = build_model(config_of(name), dtype=DOUBLE).blocks[0]
    randomise(block, 3)
    x = torch.randn(2, S, 24, generator=torch.Generator().manual_seed(4)).to(DOUBLE)
    numbers = torch.tensor([[0] * 5 + [1] * 7 + [2] * 12, [0] * 13 + [1] * 11]) if documents else None

    def outputs(bounds) -> tuple[torch.Tensor, list[torch.Tensor]]:
        block.zero_grad()
        own, state, parts = x.clone().requires_grad_(), block.mixer.new_state(), []
        for begin, end in zip(bounds, bounds[1:]):
            stream = Stream(own[:, begin:end], documents=None if numbers is None else numbers[:, begin:end])
            parts.append(block.mixer(stream.hidden, stream, state))
        y = torch.cat(parts, 1)
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
        return y.detach(), [own.grad, *(p.grad for p in block.mixer.parameters())]

    stream = Stream(x, documents=numbers)
    whole, gradients = outputs([0, S])
    assert relative(whole, block.mixer(x, stream).detach()) < EXACT  # a state changes nothing
    for cuts in (12,), (1, 2, 17), (6, 14, 15), (8, 16):
        found, own = outputs([0, *cuts, S])
        assert relative(found, whole) < EXACT, cuts
        for mine, wanted in zip(own, gradients):
            assert relative(mine, wanted) < EXACT, cuts


@pytest.mark.parametrize("name", MODELS)
def test_documents_do_not_see_each_other(name: str):
    model = build_model(config_of(name, documents=True), dtype=DOUBLE)
    randomise(model, 6)
    check_documents(model, tokens_of(), tokens_of(seed=7))


@pytest.mark.parametrize("name", MODELS)
def test_recomputation_changes_no_bit(name: str):
    def gradients(mode: str):
        model = build_model(config_of(name, activation_checkpointing={"mode": mode}))
        model(tokens_of(), tokens_of(seed=2), torch.ones(2, S))[0].backward()
        return {key: p.grad for key, p in named(model).items()}

    wanted = gradients("none")
    for mode in "selective", "full":
        found = gradients(mode)
        assert all(found[key].equal(wanted[key]) for key in wanted), mode


def flops_of_a_triangular_system(matrix, sides, *_, out_shape=None, **__) -> int:
    """The full square is counted, as for attention."""
    return 2 * math.prod(sides) * matrix[-1]


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_flops(name: str):
    """FLOPs are what torch counts, with chunks that divide the sequence."""
    config = resolve({
        **config_of(name).model_dump(exclude_unset=True, include={"training"}),
        "model": {
            "hidden_size": 24,
            "vocab_size": V,
            "norm": {"type": "rmsnorm"},
            **MODELS[name],
            "mamba2": {**MODELS[name].get("mamba2", {}), "chunk": 8},
            "mamba": {**MODELS[name].get("mamba", {}), "chunk": 4},
            "gated_delta": {**MODELS[name].get("gated_delta", {}), "chunk": 8},
        },
    })
    model = build_model(config).eval()
    for block, row in zip(model.blocks, layers_table(config)[1:-1]):
        assert row["parameters"] == sum(p.numel() for p in block.parameters())
    systems = {torch.ops.aten.linalg_solve_triangular: flops_of_a_triangular_system}
    with FlopCounterMode(display=False, custom_mapping=systems) as counter, torch.no_grad():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            model.logits(tokens_of())
    assert counter.get_total_flops() == totals(config).forward_flops * 2 * S


@pytest.mark.parametrize(
    ("name", "mode"), covering([name for name in SINGLE if name != "mamba, biases"], ["none", "full", "selective"])
)
def test_kept_activations(name: str, mode: str):
    """Bytes that exist between forward and backward: what the second block adds. A mamba layer's scan also keeps one
    fp32 state per chunk, and CPU's RMSNorm the normalised vector."""

    def kept(blocks: int) -> tuple[int, int]:
        values = {**MODELS[name], "layers": f"{MODELS[name]['layers'].split(' ')[0]} x{blocks}"}
        kind = values["layers"].split(" ")[0]
        if kind != "cca":
            values[kind] = {**values[kind], "chunk": 8}
        config = resolve({
            "model": {"hidden_size": 24, "vocab_size": V, "norm": {"type": "rmsnorm"}, **values},
            "training": {"steps": 1, "sequence_length": 64, "activation_checkpointing": {"mode": mode}},
        })
        model = build_model(config)
        with Allocations(model.parameters()) as allocations:
            loss, _ = model(tokens_of(length=64), tokens_of(length=64, seed=2), torch.ones(2, 64))
        found = allocations.bytes()
        loss.backward()
        return found, layers(config)[1].saved

    (one, row), (two, _) = kept(1), kept(2)
    tokens = 2 * 64
    wanted = row * tokens
    if mode == "none":
        wanted += 24 * tokens if "norms" not in name else 4 * (6 + 2 * 4) * tokens  # RMSNorm
        if name.split(",")[0] == "mamba":
            wanted += 2 * 8 * 48 * 4
    assert two - one == pytest.approx(wanted * 4, rel=0.002)


@pytest.mark.parametrize("name", MODELS)
def test_decoding_state_does_not_grow(name: str):
    config = config_of(name)
    model, state = build_model(config).eval(), None
    sizes = []
    for length in (S, S // 2):
        state = model.new_state()
        with torch.no_grad():
            model.decode(tokens_of(length=length), state, 0)
        sizes.append([
            0
            if type(own.mixer).__name__ == "KeyValueCache"
            else sum(tensor[0].numel() for tensor in vars(own.mixer).values() if isinstance(tensor, torch.Tensor))
            for own in state
        ])
    assert sizes[0] == sizes[1]
    for size, block, row in zip(sizes[0], model.blocks, layers(config)[1:-1]):
        if "attention" not in str(block.pattern) and "cca" not in str(block.pattern):  # whose caches grow
            assert size == row.counts.state


def step(name: str, layout: Layout, mode: str = "none"):
    """(loss, this rank's gradients by name with their spans, logits) on this rank of the layout."""
    mesh = Mesh.single() if layout.tensor == 1 else Mesh.build(layout)
    model = build_model(config_of(name, activation_checkpointing={"mode": mode}), mesh, dtype=DOUBLE)
    with torch.no_grad():
        for key, p in named(model).items():
            whole = torch.randn(p.logical.shape, generator=torch.Generator().manual_seed(sum(key.encode())))
            whole = own_part(whole, p.logical.spans(mesh.tensor.rank, mesh.tensor.size))
            p.add_((0.1 if name == "zamba2" else 0.2) * whole)
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


def steps(layout: Layout, mode: str) -> dict[str, tuple]:
    """`step` of every model, in one job."""
    return {name: step(name, layout, mode) for name in MODELS}


@pytest.mark.parametrize(
    "ranks, sequence, mode",
    toured([(2, True, "full"), (2, False, "none"), (2, True, "none"), (4, True, "selective")], "layouts"),
)
def test_tensor_parallel_ranks_equal_one(ranks: int, sequence: bool, mode: str):
    found = run(ranks, steps, Layout(tensor=ranks, sequence=sequence), mode)
    for name in MODELS:
        for rank, own in enumerate(each[name] for each in found):
            check_part(own, whole(name), (name, rank))


@pytest.mark.parametrize("name", MODELS)
def test_no_weight_decay_of_vectors_and_decays(name: str):
    """A_log, D, biases of time steps, temperatures, norms and biases: all vectors, and Mamba's A_log, which is none."""
    config, model = config_of(name), build_model(config_of(name), device="meta")
    groups = parameter_groups(config, model.parameters())
    kept = {p.logical.name for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    assert kept == {key for key, p in named(model).items() if p.dim() == 1 or key.endswith(".A_log")}
    assert all(group["lr_scale"] == 1.0 for group in groups)


def test_initial_values_are_the_published_ones():
    model = {
        "layers": "mamba mamba2",
        "hidden_size": 256,
        "vocab_size": V,
        "mamba2": {"head_dim": 1, "state_size": 8},
        "init": {"hidden": "fan_in_uniform", "output": "scaled_fan_in_uniform"},
    }
    training = {"training": {"steps": 1, "sequence_length": S}}
    weights = {name: p.detach() for name, p in named(build_model(resolve({"model": model, **training}))).items()}
    one, two = "layers.0.mamba", "layers.1.mamba2"
    torch.testing.assert_close(weights[f"{one}.A_log"].exp(), torch.arange(1.0, 17.0).expand(512, 16))
    for name in (one, two):
        steps = F.softplus(weights[f"{name}.dt_bias"])
        assert 0.001 <= steps.min() < 0.00104 and 0.096 < steps.max() <= 0.1001
        spread = (steps.log() - math.log(0.001)) / math.log(100)  # uniform in [0, 1]
        assert abs(spread.mean() - 0.5) < 0.04 and abs(spread.std() - 12**-0.5) < 0.02
        assert (weights[f"{name}.D"] == 1).all()
        for tensor, limit in (
            (f"{name}.zx.weight", 1 / 16),
            (f"{name}.output.weight", 1 / 32),
            (f"{name}.x_conv.weight", 0.5),
            (f"{name}.x_conv.bias", 0.5),
        ):
            values = weights[tensor]
            assert 0.98 * limit < values.abs().max() <= limit and abs(values.std() / limit - 3**-0.5) < 0.03, tensor
    for heads in (1, 4):  # each reads only its own channels
        model["mamba"] = {"heads": heads}
        weights = {name: p.detach() for name, p in named(build_model(resolve({"model": model, **training}))).items()}
        values, limit = weights[f"{one}.dt_bc.weight"], (heads / 512) ** 0.5
        assert 0.98 * limit < values.abs().max() <= limit and abs(values.std() / limit - 3**-0.5) < 0.03, heads
    A = weights[f"{two}.A_log"].exp()
    assert 1 <= A.min() < 1.2 and 15.8 < A.max() <= 16.01 and abs(A.mean() - 8.5) < 0.6
    assert weights[f"{one}.dt.weight"].abs().max() == pytest.approx(16**-0.5, rel=0.01)
