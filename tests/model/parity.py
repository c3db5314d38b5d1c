"""Comparing our model with one of transformers, through the tables that export uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
import transformers

from megatron.checkpoint.hf import convert
from megatron.checkpoint.hf.config import architecture_of, model_values
from megatron.config import Config, resolve
from megatron.model.stack import Model, build_model
from megatron.parallel.layers.parameters import stored_tensors
from megatron.parallel.layout.shard import Span
from tests.float64 import DOUBLE, EXACT, wider
from tests.margins import Measured

Spans = Sequence[Sequence[Span]]
# The loss of a step, its gradients with their spans, by name, and logits [B, S, V].
Step = tuple[float, Mapping[str, tuple[torch.Tensor, Spans]], torch.Tensor]
# Shapes of tiny configurations of transformers.
TINY = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_LIKE = {**TINY, "num_key_value_heads": 2, "intermediate_size": 40}


def randomise(module: torch.nn.Module, seed: int, std: float = 0.15) -> None:
    """Every parameter, also where it starts at 0 or 1: otherwise a comparison is blind to them.

    Args:
        std: of matrices.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            vector = parameter.dim() == 1
            norm = vector and name.endswith(("weight", "scale", "temp"))
            parameter.copy_(1.0 + 0.3 * noise if norm else (0.2 if vector else std) * noise)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("tid2eid"):  # different experts of each token
                order = torch.rand(len(buffer), _experts(module, name), generator=generator).argsort(1)
                buffer.copy_(order[:, : buffer.shape[1]])
            if name.endswith("balancing_biases"):  # of ZAYA1's routers, but the last, which is -1 whatever a file says
                buffer[:-1] = 0.02 * torch.randn(buffer[:-1].shape, generator=generator)


def _experts(module: torch.nn.Module, table: str) -> int:
    return cast(Any, module.get_submodule(table.rpartition(".")[0])).num_experts


def named(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Our parameters by logical name."""
    return {parameter.logical.name: parameter for parameter in model.parameters()}


def own_part(whole: torch.Tensor, spans: Spans) -> torch.Tensor:
    """The part of a whole tensor of a rank with these spans (of each dimension)."""
    for dim, runs in enumerate(spans):
        whole = torch.cat([whole.narrow(dim, each.start, each.length) for each in runs], dim)
    return whole


def check_part(found: Step, whole: Step, what: object) -> None:
    """A tensor parallel rank's step, in float64, is its part of one rank's."""
    loss, gradients, logits = found
    assert loss == pytest.approx(whole[0], rel=EXACT), what
    assert relative(logits, whole[2]) < EXACT, what
    for name, (gradient, spans) in gradients.items():
        assert relative(gradient, own_part(whole[1][name][0], spans)) < EXACT, (what, name)


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that checkpoints have of a model, by logical name: its parameters, and the corrections of routers."""
    return {tensor.logical.name: tensor for tensor in stored_tensors(model)}


def settings_of(theirs: transformers.PreTrainedConfig, **training) -> Config:
    values = model_values(theirs)
    for kind in {"dsa", "csa"} & set(values):
        values = {**values, kind: {**values[kind], "index_loss": 0.0}}
    if "moe" in values:
        values = {**values, "moe": {**values["moe"], "losses": {"balance": 0.0}}}  # transformers' loss is not asked for
    return resolve({"model": values, "training": {"steps": 1, "sequence_length": 24, **training}})


def twin(
    theirs: transformers.PreTrainedModel, **training
) -> tuple[Model, list[convert.ConversionStep], dict[str, torch.Tensor]]:
    """Our model with the weights of theirs, the steps of the conversion, and the state dict that it came from."""
    config = settings_of(theirs.config, **training)
    model = build_model(config, dtype=next(theirs.parameters()).dtype)
    architecture = architecture_of(theirs.config)
    ours = stored(model)
    steps = convert.plan(architecture, ours, config.model)
    state = on_disk(theirs.state_dict(), theirs.config.model_type)
    with torch.no_grad():
        for name, tensor in convert.from_hf(architecture, steps, state, state.__getitem__):
            assert ours[name].shape == tensor.shape, name
            ours[name].copy_(tensor)
    return model, steps, state


def relative(found: torch.Tensor, wanted: torch.Tensor) -> Measured:
    return Measured(((found - wanted).norm() / wanted.norm().clamp_min(1e-30)).item())


def hf_gradients(theirs: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    architecture = architecture_of(theirs.config)
    tensors = {**dict(theirs.named_buffers()), **{name: p.grad for name, p in theirs.named_parameters()}}
    gradients = on_disk(tensors, theirs.config.model_type)
    return {architecture.canonical(name): gradient for name, gradient in gradients.items()}


def on_disk(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Tensors of a model's memory by the names that it is saved with: there experts are single, and so are
    the convolutions of queries, keys and values."""
    single = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
    if kind in ("mixtral", "minimax", "minimax_m2", "kimi_linear", "deepseek_v4"):
        single = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    found = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".experts.")
        if kind in ("mixtral", "minimax", "minimax_m2"):
            module, name = (each.replace(".mlp", ".block_sparse_moe") for each in (module, name))
        mixer, _, rest = name.rpartition(".")[0].rpartition(".")
        if kind in ("olmo_hybrid", "kimi_linear") and rest == "conv1d":
            parts = tensor.split([len(tensors[f"{mixer}.{each}_proj.weight"]) for each in "qkv"])
            found |= {f"{mixer}.{each}_conv1d.weight": part for each, part in zip("qkv", parts)}
            continue
        if last not in single or tensor.dim() != 3 or kind in ("zaya", "gpt_oss", "gemma4_text"):
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = zip(single[last], expert.chunk(len(single[last])))
            found |= {f"{module}.experts.{number}.{each}.weight": part for each, part in parts}
    return found


def _let_routers_differ(theirs: transformers.PreTrainedModel) -> None:
    """ZAYA1's tokens shall differ in what they choose, and some shall use no expert."""
    with torch.no_grad():
        for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if ".mlp.gate." in name and tensor.dim() == 2 and tensor.is_floating_point():
                tensor *= 5.0
            if name.endswith("balancing_biases"):
                tensor[-1] = 0.0


def compare(theirs: transformers.PreTrainedModel, seed: int, length: int = 24, std: float = 0.15) -> None:
    """Equal logits, loss and gradients of every parameter in float64, after randomising every parameter.

    Args:
        theirs: built and used within `wider`.
    """
    randomise(theirs, seed, std)
    _let_routers_differ(theirs)
    model, steps, _ = twin(theirs.eval())
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(theirs.config.vocab_size, (3, length), generator=generator)
    labels = torch.randint(theirs.config.vocab_size, (3, length), generator=generator)
    with wider():
        logits = theirs(input_ids=tokens, use_cache=False).logits
        wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        wanted.backward()
    assert logits.dtype == DOUBLE and relative(model.logits(tokens), logits) < EXACT

    loss, _ = model(tokens, labels, torch.full(labels.shape, 1.0 / labels.numel(), dtype=DOUBLE))
    loss.backward()
    assert relative(loss, wanted) < EXACT
    theirs_by_name, ours_by_name = hf_gradients(theirs), named(model)
    compared = set()
    for step in steps:
        if not set(step.ours) <= set(ours_by_name):
            continue  # a correction, which has no gradient
        if all(theirs_by_name[name] is None for name in step.theirs):  # an indexer, which their class does not train
            assert all(not ours_by_name[name].grad.any() for name in step.ours if ours_by_name[name].grad is not None)
            compared.update(step.ours)
            continue
        for name, gradient in step.from_hf(theirs_by_name.__getitem__):
            assert gradient.abs().max() > 0, f"the test is blind to {name}"
            assert relative(ours_by_name[name].grad, gradient) < EXACT, name
            compared.add(name)
    assert compared == set(ours_by_name)
