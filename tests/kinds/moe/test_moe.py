"""The mixture of experts against loops over tokens in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import resolve
from megatron.config.variants import options_of
from megatron.engine.optimizers.groups import parameter_groups
from megatron.engine.optimizers.muon import muon_direction
from megatron.kinds.moe.layer import MoE
from megatron.kinds.moe.router import choose_experts, scores_of, sinkhorn
from megatron.model.initialisation import Initialisation
from megatron.model.stack import build_model
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.mesh import Mesh
from tests.float64 import DOUBLE, EXACT, wider
from tests.kinds.moe.blocks import H, config_of, inputs, layer, run
from tests.model.parity import named, randomise, relative

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu2": lambda z: F.relu(z) ** 2, "identity": lambda z: z}


def expert(moe: MoE, number: int, x: Tensor) -> Tensor:
    """One expert on one token, by the formulas."""
    own, weights = moe.options, {name: p.double() for name, p in named(moe).items()}
    down = weights["moe.experts.down.weight"][number]
    if own.gated:
        gate, up = (weights["moe.experts.gate_up.weight"][number] @ x).split(own.hidden_size)
        return down @ (ACTIVATIONS[own.activation](gate) * up)
    return down @ ACTIVATIONS[own.activation](weights["moe.experts.up.weight"][number] @ x)


def by_loops(moe: MoE, x: Tensor) -> Tensor:
    """The layer, token by token. Capacity by counting."""
    own, parameters = moe.options, {name: p.double() for name, p in named(moe).items()}
    tokens, taken, rows = x.double().flatten(0, 1), [0] * own.experts, []
    room = (
        math.inf
        if own.capacity_factor is None
        else math.ceil(own.capacity_factor * len(tokens) * own.top_k / own.experts)
    )
    for token in tokens:
        logits = parameters["moe.router.weight"] @ token
        if own.router.bias:
            logits = logits + parameters["moe.router.bias"]
        scores = torch.softmax(logits, 0) if own.router.score == "softmax" else torch.sigmoid(logits)
        wanted = scores if moe.balance.correction is None else scores + moe.balance.correction.double()
        chosen = sorted(range(own.experts), key=lambda e: -wanted[e])[: own.top_k]
        total = sum(scores[e] for e in chosen) if own.router.normalize else 1.0
        y = torch.zeros(H, dtype=torch.float64)
        for e in chosen:
            taken[e] += 1
            if taken[e] <= room:
                y = y + scores[e] / total * own.router.scale * expert(moe, e, token)
        if own.shared_size:
            gate, up = (parameters["moe.shared.gate_up.weight"] @ token).split(own.shared_size)
            shared = parameters["moe.shared.down.weight"] @ (F.silu(gate) * up)
            if own.shared_gate:
                shared = shared * torch.sigmoid(parameters["moe.shared.gate.weight"][0] @ token)
            y = y + shared
        rows.append(y)
    return torch.stack(rows).view(x.shape)


OPTIONS = {
    "softmax": {"top_k": 2},
    "one expert, sigmoid, bias, erf (BlackMamba)": {
        "top_k": 1,
        "activation": "gelu",
        "router": {"score": "sigmoid", "bias": True},
    },
    "all experts": {"top_k": 8, "router": {"normalize": True}},
    "plain experts": {"top_k": 3, "gated": False, "activation": "relu2"},
    "gated shared expert": {"top_k": 2, "shared_size": 20, "shared_gate": True},
    "correction": {"top_k": 4, "router": {"score": "sigmoid", "correction": "sign", "scale": 2.5}},
    "capacity 1": {"top_k": 2, "capacity_factor": 1.0},
    "capacity 0.5": {"top_k": 3, "capacity_factor": 0.5, "router": {"normalize": True}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_loops(name: str):
    moe, x = layer(**OPTIONS[name]), inputs()
    z = x.detach().clone().requires_grad_()
    wanted = by_loops(moe, z)
    y = run(moe, x)
    assert relative(y.double(), wanted) < EXACT
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(DOUBLE)
    (y * weight).sum().backward()
    found = {each: p.grad.clone() for each, p in named(moe).items()}
    for p in moe.parameters():
        p.grad = None
    (wanted * weight).sum().backward()
    assert relative(x.grad.double(), z.grad) < EXACT
    for each, p in named(moe).items():
        assert p.grad.abs().max() > 0, f"the test is blind to {each}"
        assert relative(found[each], p.grad) < EXACT, each


def test_experts_without_tokens():
    """No token chooses most experts: their gradients are zero, and nothing uninitialised is seen."""
    moe, x = layer(top_k=1), inputs()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[5] = 1.0
    y = run(moe, x.abs())
    y.sum().backward()  # a gradient of stride 0
    gradient = named(moe)["moe.experts.down.weight"].grad
    assert gradient[5].abs().max() > 0 and gradient[torch.arange(8) != 5].abs().max() == 0
    assert y.isfinite().all() and x.grad.isfinite().all()


def test_expert_choice():
    """Each expert has its best tokens, the number of an even load."""
    moe, x = layer(top_k=2, router={"select": "expert_choice"}), inputs()
    tokens = x.detach().double().flatten(0, 1)
    scores = torch.softmax(tokens @ named(moe)["moe.router.weight"].double().T, -1)
    wanted = torch.zeros_like(tokens)
    for e in range(8):
        for t in sorted(range(20), key=lambda t: -scores[t, e])[: 20 * 2 // 8]:
            wanted[t] += scores[t, e] * expert(moe, e, tokens[t])
    y = run(moe, x)
    assert relative(y.double().flatten(0, 1), wanted) < EXACT
    y.sum().backward()
    assert all(p.grad.abs().max() > 0 for p in moe.parameters())


@pytest.mark.parametrize("start", ["load", "ones"])
def test_sinkhorn(start: str):
    """The factors of the definition in float64. 4096 skewed tokens are balanced as published, and evaluation is
    greedy."""
    own = config_of({
        "experts": 8,
        "top_k": 1,
        "router": {"select": "sinkhorn", "sinkhorn_iterations": 3, "sinkhorn_start": start},
    }).model.moe
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 8, generator=generator).to(DOUBLE) + torch.linspace(0, 1.5, 8)
    cost = logits.double().exp()
    d1 = torch.ones(8).double() if start == "ones" else 1 / (8 * cost.sum(0))
    for _ in range(3):
        d0 = 1 / (4096 * (cost @ d1))
        d1 = 1 / (8 * (cost.T @ d0))
    wanted = d0[:, None] * cost * d1
    assert relative(sinkhorn(logits, own.router).double().exp(), wanted) < EXACT
    scores = scores_of(logits, "sigmoid")

    def skew(training: bool) -> float:
        load = torch.bincount(choose_experts(logits, scores, None, own, training).experts_Tk.flatten(), minlength=8)
        return (load.max() / load.float().mean()).item()

    assert skew(False) > 2.0 > 1.15 > skew(True)


def test_sinkhorn_of_tokens_with_logits_of_their_own_level():
    """Its row's factor removes a number that is added to all logits of a token: it moves no token, were it 100."""
    own = config_of({
        "experts": 8,
        "top_k": 1,
        "router": {"select": "sinkhorn", "sinkhorn_iterations": 3, "sinkhorn_start": "ones"},
    }).model.moe
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2048, 8, generator=generator) + torch.linspace(0, 1.5, 8)
    level = 50 * torch.randn(2048, 1, generator=generator)
    flat, steep = (
        choose_experts(each, each.sigmoid(), None, own, True).experts_Tk for each in (logits, logits + level)
    )
    assert (flat == steep).float().mean() > 0.998  # rounding decides near ties


def test_each_expert_is_a_matrix_of_its_own():
    """Orthogonal initial values and Muon treat gate, up and down of every expert separately."""
    model = build_model(
        config_of({"experts": 3, "hidden_size": 8}, init={"hidden": "orthogonal", "output": "orthogonal"})
    )
    weights = named(model)
    update = torch.randn(3, 16, H, generator=torch.Generator().manual_seed(0))
    found = muon_direction(update, (8, 8))
    for e in range(3):
        for part in weights["layers.0.moe.experts.gate_up.weight"][e].split(8):
            assert (part @ part.T - torch.eye(8)).abs().max() < 1e-5
        down = weights["layers.0.moe.experts.down.weight"][e]
        assert (down.T @ down - torch.eye(8)).abs().max() < 1e-5
        for mine, one in zip(found[e].split(8), update[e].split(8)):
            assert torch.equal(mine, muon_direction(one, None))
    assert weights["layers.0.moe.experts.down.weight"].unique().numel() > 300
    groups = parameter_groups(
        resolve({
            "model": {"layers": "attention/moe", "hidden_size": H, "vocab_size": 37, "attention": {"heads": 2}},
            "training": {"steps": 1, "sequence_length": 24},
            "optimizer": {"type": "muon"},
        }),
        model.parameters(),
    )
    names = {p.logical.name for group in groups if group["matrix"] for p in group["params"]}
    assert {name for name in weights if ".experts." in name} <= names and not any("router" in name for name in names)


@pytest.mark.parametrize("top_k", [1, 3])
def test_auxiliary_losses(top_k: int):
    """Of two layers with coefficients of their own: the balancing loss against transformers', the others against their
    formulas. Theirs pools layers and does not divide by k, so it is called layer by layer. The added loss, and its
    gradient.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    coefficients = ({"balance": 0.3, "sequence": 0.2, "z": 0.05}, {"balance": 0.1})
    config = config_of(
        {"experts": 8, "top_k": top_k, "hidden_size": 8, "losses": coefficients[0]},
        layers="moe moe@b",
        norm={"type": "rmsnorm"},
        variants={"b": {"losses": {**coefficients[1], "sequence": 0.0, "z": 0.0}}},
    )
    model, tokens, logits = (
        build_model(config, dtype=DOUBLE),
        torch.randint(37, (3, 24), generator=torch.Generator().manual_seed(1)),
        [],
    )
    randomise(model, 4)
    for block in model.blocks:
        block.ffn.router.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
    none = torch.zeros(3, 24)
    found, _ = model(tokens, tokens, none)
    weights, wanted = [block.ffn.router.weight for block in model.blocks], 0.0
    with wider():
        for own, each in zip(coefficients, logits):
            balance = load_balancing_loss_func((each,), 8, top_k) / top_k
            probabilities, chosen = (
                each.softmax(-1).view(3, 24, 8),
                F.one_hot(each.topk(top_k).indices, 8).view(3, 24, top_k, 8),
            )
            share = chosen.sum((1, 2)) / (24 * top_k)
            sequence = torch.stack([8 * (share[b] * probabilities[b].mean(0)).sum() for b in range(3)]).mean()
            z = sum(torch.log(torch.exp(row).sum()) ** 2 for row in each) / len(each)
            wanted = wanted + own["balance"] * balance + own.get("sequence", 0.0) * sequence + own.get("z", 0.0) * z
    assert found.item() == pytest.approx(wanted.item(), rel=EXACT)
    for mine, theirs in zip(
        torch.autograd.grad(found, weights, retain_graph=True), torch.autograd.grad(wanted, weights)
    ):
        assert theirs.abs().max() > 0 and relative(mine, theirs) < EXACT


@pytest.mark.parametrize("name", [*OPTIONS, "groups", "sinkhorn", "expert choice", "no expert"])
def test_no_size_depends_on_the_data(name: str):
    """Tensors without values are enough for both passes: nothing asks a device for a number, so none has to wait."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    others = {
        "groups": {"router": {"groups": 4, "top_groups": 2}, "losses": {"balance": 0.1, "sequence": 0.1, "z": 0.1}},
        "sinkhorn": {"router": {"select": "sinkhorn"}},
        "expert choice": {"router": {"select": "expert_choice"}},
        "no expert": {"top_k": 1, "router": {"network": "mlp", "average": False, "skip": True, "correction": "sign"}},
    }
    model = config_of({"experts": 8, **{**OPTIONS, **others}[name], "hidden_size": 16}).model
    with FakeTensorMode():
        make = ParameterFactory(Mesh.single(), dtype=torch.bfloat16, values=False)
        moe = MoE(make.scope("moe"), model, model.moe, Initialisation(model.init, H, 1))
        x = torch.randn(2, 10, H, dtype=torch.bfloat16, requires_grad=True)
        run(moe, x).sum().backward()
    assert all(p.grad is not None for p in moe.experts.parameters())


@pytest.mark.parametrize("dtype, scale, near", [(torch.bfloat16, 1.0, 2.0**-6), (torch.float16, 2.0**17, 2.0**-7)])
def test_auxiliary_gradients_in_half_precision(dtype: torch.dtype, scale: float, near: float):
    """Gradients of auxiliary losses are as large as in fp32 where the stream is narrow, and finite where fp16 scales
    losses.
    """
    config = config_of(
        {"experts": 4, "hidden_size": 16, "losses": {"z": 0.7}}, layers="moe moe", norm={"type": "rmsnorm"}
    )
    tokens = torch.randint(37, (3, 25), generator=torch.Generator().manual_seed(1))

    def gradients(dtype: torch.dtype, scale: float) -> list[Tensor]:
        model = build_model(config, dtype=dtype)
        loss, _ = model(tokens[:, :-1], tokens[:, 1:], torch.zeros(3, 24))  # no label counts
        (loss * scale).backward()
        return [block.ffn.router.weight.grad / scale for block in model.blocks]

    for found, wanted in zip(gradients(dtype, scale), gradients(torch.float32, 1.0)):
        assert ((found * wanted).sum() / wanted.square().sum()).item() == pytest.approx(1.0, abs=near)


def test_variants_and_dense_layers():
    """A dense first layer by the pattern, and layers with more and smaller experts by a variant."""
    config = config_of(
        {"experts": 4, "hidden_size": 24},
        layers="attention/mlp attention/moe attention/moe@fine",
        variants={"fine": {"experts": 12, "hidden_size": 8, "top_k": 8}},
    )
    model = build_model(config, device="meta")
    shapes = {name: tuple(p.shape) for name, p in named(model).items() if "experts" in name}
    assert shapes == {
        "layers.1.moe.experts.gate_up.weight": (4, 48, H),
        "layers.1.moe.experts.down.weight": (4, H, 24),
        "layers.2.moe.experts.gate_up.weight": (12, 16, H),
        "layers.2.moe.experts.down.weight": (12, H, 8),
    }
    kinds = [block.ffn.name for block in model.plan.blocks]
    assert kinds == ["mlp", "moe", "moe"]
    assert options_of(config.model, model.plan.blocks[2].ffn).top_k == 8
