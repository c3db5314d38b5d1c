"""Adapters on layouts: a step's loss and gradients equal plain PyTorch with merged matrices, in one process.

The oracle puts W + s B A, with DoRA's lengths, in the place of each matrix, and lets autograd differentiate it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.config import resolve
from megatron.config.variants import overlay
from megatron.model.stack import Model, build_model
from megatron.parallel.layers.linear import ColumnLinear, PartialLinear, RowLinear, WholeLinear
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.shard import LogicalTensor, Role
from megatron.testing import layouts
from megatron.testing.checks import batch, noise, part_of
from megatron.testing.ranks import on_ranks

pytestmark = pytest.mark.layouts

RANK = 3
DENSE = {"layers": "(attention/mlp) x2", "attention": {"heads": 4, "kv_heads": 2, "output_bias": True},
         "mlp": {"gated": True, "bias": True}}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "one key head": {**DENSE, "attention": {"heads": 4, "kv_heads": 1, "qkv_bias": True}},
    "mamba2": {"layers": "mamba2/mlp attention/mlp", "attention": {"heads": 4}, "mamba2": {"head_dim": 8}},
    "rwkv7": {"layers": "(rwkv7/rwkv7_ffn) x2", "rwkv7": {"head_dim": 8}},
    "shared": {
        "layers": "mamba2+shared_attention x3 mamba2+shared_attention/mlp",
        "mamba2": {"head_dim": 8, "state_size": 8},
        "shared_attention": {
            **{"heads": 4, "kv_heads": 2, "blocks": 2, "adapter_rank": 3, "attention_adapters": True},
            "mlp": {"hidden_size": 40},
        },
        "embedding": {"tied": True},
    },
    "latent": {
        "layers": "(mla/mlp) x2",
        "mla": {"heads": 4, "query_rank": 12, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 8},
    },
    "delta": {
        "layers": "(gated_delta/mlp) x2",
        "gated_delta": {"heads": 4, "key_heads": 2, "key_dim": 8, "value_dim": 8},
    },
    "experts": {
        "layers": "(attention/moe) x2",
        "attention": {"heads": 4},
        "moe": {
            **{"experts": 4, "top_k": 2, "hidden_size": 16, "shared_size": 24, "gated": True},
            "losses": {"balance": 0.0},
        },
    },
}


def values_of(kind: str, **adapter: Any) -> dict[str, Any]:
    return overlay(
        {
            "model": {"hidden_size": 32, "vocab_size": 48, "norm": {"type": "rmsnorm"}, **KINDS[kind]},
            "training": {"steps": 3, "sequence_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "seed": 3},
            "checkpoint": {"initialize_from": "nothing/is/read"},
            "adapter": {"type": "lora", "rank": RANK, "alpha": 5.0, **adapter},
        },
        layouts.RECIPE,
    )


def drawn(tensor: LogicalTensor) -> np.ndarray:
    """Values of an adapter's tensor, which zero would hide much of."""
    return noise(tensor) + (1.0 if tensor.name.endswith("magnitude") else 0.0)


# -- one process -------------------------------------------------------------------------------------------------------


def adapted(model: Model, targets: str) -> dict[str, tuple[torch.nn.Parameter, list[int]]]:
    """Matrices that have an adapter by the name of their layer, and the rows of the matrices that are fused there."""
    found = {}
    for each in model.modules():
        if type(each) in (ColumnLinear, PartialLinear, RowLinear, WholeLinear):
            weight: Any = each.weight
            logical = logical_of(weight)
            name = logical.name.removesuffix(".weight")
            if logical.role in (Role.HIDDEN, Role.OUTPUT) and (targets == "all" or name.endswith(targets)):
                found[name] = (weight, list(logical.matrices or logical.shape[:1]))
    return found


def oracle(values: Mapping[str, Any], dtype: torch.dtype) -> tuple[float, dict[str, np.ndarray]]:
    """The mean cross-entropy of a step, and the gradient of the loss by logical name."""
    config = resolve(dict(values))
    options: Any = config.adapter  # type: ignore[attr-defined]
    model = build_model(resolve({**values, "adapter": {}}), dtype=dtype).train()
    leaves: dict[str, Tensor] = {}
    replaced: dict[str, Tensor] = {}
    places = {id(parameter): name for name, parameter in model.named_parameters()}
    for layer, (weight, parts) in adapted(model, options.targets[0]).items():
        shapes: dict[str, tuple[int, ...]] = {
            "a": (RANK * len(parts), weight.shape[1]), "b": (weight.shape[0], RANK), "magnitude": weight.shape[:1]
        }  # fmt: skip
        if options.type == "lora":
            del shapes["magnitude"]
        own = {}
        for name, shape in shapes.items():
            begun = drawn(LogicalTensor(f"{layer}.adapter.{name}", shape, Role.HIDDEN))
            own[name] = leaves[f"{layer}.adapter.{name}"] = torch.from_numpy(begun).to(dtype).requires_grad_()
        products = [b @ a for a, b in zip(own["a"].split(RANK), own["b"].split(parts))]
        scale = options.alpha / (RANK**0.5 if options.rslora else RANK)
        total = weight.detach() + scale * torch.cat(products)
        if options.type == "dora":
            total = own["magnitude"].unsqueeze(1) * total / total.norm(dim=1, keepdim=True).detach()
        replaced[places[id(weight)]] = total
    given, M, loss = batch(config), config.training.micro_batch_size, 0.0
    count = given["tokens"][:, 1:].numel()
    for begin in range(0, given["tokens"].shape[0], M):
        tokens = given["tokens"][begin : begin + M]
        found = torch.func.functional_call(
            model, replaced, (tokens[:, :-1], tokens[:, 1:], torch.full(tokens[:, 1:].shape, 1 / count, dtype=dtype))
        )
        found[0].backward(retain_graph=True)
        loss += float(found[1].sum()) / count
    return loss, {name: leaf.grad.double().numpy().reshape(-1) for name, leaf in leaves.items()}  # type: ignore[union-attr]


# -- ranks -------------------------------------------------------------------------------------------------------------


def on_this_rank(values: dict[str, Any], ranks: int) -> tuple[float, list[tuple], list[str]]:
    """One step of the engine, as `megatron.testing.layouts.on_this_rank`, and which parameters have an optimizer."""
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.engine.engine import build_engine
    from megatron.parallel.layout.layout import Layout
    from megatron.parallel.layout.mesh import Mesh

    config = resolve(values, ranks=ranks)
    prepare_deepspeed(torch.device("cpu"))
    engine = build_engine(config, Mesh.build(Layout.of(config, ranks)), "cpu")
    for fragment in engine.state.masters():
        shard = part_of(drawn(fragment.tensor), fragment.tensor, fragment.tensor_rank, fragment.tensor_ranks)
        fragment.data.copy_(torch.from_numpy(shard[fragment.start : fragment.start + fragment.data.numel()]))
    engine.state.refresh()
    result = engine.step(layouts._own(config, engine.mesh.data.rank, engine.mesh.data.size), config.optimizer.lr)
    sums = torch.tensor([float(result.loss) * float(result.tokens), float(result.tokens)], dtype=torch.float64)
    torch.distributed.all_reduce(sums)
    saved = [*engine.state.fragments()]
    gradients = [
        (each.tensor, each.tensor_rank, each.tensor_ranks, each.start, each.data.numpy().copy())
        for each in saved
        if each.state == "momentum_buffer"
    ]
    return float(sums[0] / sums[1]), gradients, sorted({each.tensor.name for each in saved})


def check(values: dict[str, Any], layout: dict[str, Any]) -> None:
    loss, wanted = oracle(values, torch.float32)
    exact_loss, exact = oracle(values, torch.float64)
    ranks = layout.pop("ranks", 2)
    answers = on_ranks(ranks, on_this_rank, overlay(values, layout), ranks)
    found = layouts._assembled([answer[1] for answer in answers])
    assert found.keys() == wanted.keys()
    assert {name for answer in answers for name in answer[2]} == wanted.keys()  # nothing else is trained or saved
    assert abs(answers[0][0] / loss - 1) <= 1e-5 + 10 * abs(loss / exact_loss - 1)
    sizes = {name: np.linalg.norm(gradient) for name, gradient in wanted.items()}
    spreads = {name: np.linalg.norm(gradient - exact[name]) / sizes[name] for name, gradient in wanted.items()}
    typical = np.mean(np.square([*spreads.values()])) ** 0.5  # a magnitude of three elements may be exact by chance
    for name, gradient in wanted.items():
        # As `check_layouts` has it: ten times what fp32 differs from float64 in one process is rounding.
        room = 1e-5 + 10 * max(spreads[name], typical)
        assert sizes[name] > 0 and np.linalg.norm(found[name] - gradient) <= room * sizes[name], name


TENSOR, SEQUENCE = {"parallel": {"tensor": 2}}, {"parallel": {"tensor": 2, "sequence": True}}
PIPELINE, ZERO = {"parallel": {"pipeline": 2}}, [{"zero": {"stage": stage}} for stage in range(4)]
CASES = [
    ("dense", {}, {"ranks": 1}),
    *(("dense", {}, layout) for layout in (TENSOR, SEQUENCE, PIPELINE, *ZERO)),
    *(("dense", {"type": "dora", "rslora": True}, layout) for layout in (TENSOR, SEQUENCE, PIPELINE, ZERO[1], ZERO[3])),
    *(("one key head", {"type": "dora"}, layout) for layout in (TENSOR, SEQUENCE)),
    *(("mamba2", {"type": "dora"}, layout) for layout in (TENSOR, SEQUENCE, PIPELINE, ZERO[1], ZERO[3])),
    *(("rwkv7", {}, layout) for layout in (TENSOR, PIPELINE, ZERO[3])),
    *(("shared", {"type": "dora"}, layout) for layout in (TENSOR, SEQUENCE, PIPELINE)),
    *((kind, {"type": "dora"}, layout) for kind in ("latent", "delta") for layout in (TENSOR, SEQUENCE)),
    *(("experts", {"type": "dora"}, layout) for layout in (TENSOR, SEQUENCE, ZERO[1])),
    ("dense", {"targets": ["attention.key_value"]}, TENSOR),
    ("dense", {}, {"parallel": {"context": 2}}),
    ("dense", {"type": "dora"}, {"training": {"activation_checkpointing": {"mode": "full"}}}),
]


@pytest.mark.parametrize("kind, adapter, layout", CASES)
def test_a_step_is_that_of_one_process(kind: str, adapter: dict[str, Any], layout: dict[str, Any]) -> None:
    check(values_of(kind, **adapter), dict(layout))
