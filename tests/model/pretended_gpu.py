"""A program: runs small models on CUDA tensors that have no values, and prints what went wrong, as JSON.

torch's fake tensors compute shapes, types and devices only. They refuse what a GPU refuses (operands on two devices)
and what makes the host wait for it (reading a value). Where torch was built without CUDA two pieces are missing for
them: a device guard, and the engine of backward passes. Both are put in place here, so this has a process of its own.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node

from megatron.config import load
from megatron.config.schema import Config
from megatron.kinds.common.attention import attend
from megatron.model.stack import Model, build_model

DEVICE = "cuda"
TASKS = itertools.count()  # numbers of backward passes


def let_torch_handle_cuda_tensors() -> None:
    """Give a torch without CUDA the entry that it misses for such tensors: the one of `meta`, which does nothing."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[14]
    torch.autograd.grad = gradients_of
    attend._compiled_flex = lambda: _plain_attention  # to compile FlexAttention for a GPU takes one


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask, enable_gqa: bool, return_lse: bool = False, **_: object
) -> Tensor | tuple[Tensor, Tensor]:
    """Results of FlexAttention's shapes, types and devices. Values do not matter."""
    assert block_mask.kv_indices.device == q.device
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)
    return (y, q.float().sum(-1)) if return_lse else y


def gradients_of(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], given: Sequence[Tensor], **_: object
) -> list[Tensor | None]:
    """`torch.autograd.grad`, node by node: torch's engine wants a GPU for them. An input ends the way behind it.

    The pass has a number as in torch's engine. Without it a recomputation is repeated for each tensor that it saves.
    """
    task, number = torch._C._current_graph_task_id, next(TASKS)
    torch._C._current_graph_task_id = lambda: number
    try:
        return _gradients_of(outputs, inputs, given)
    finally:
        torch._C._current_graph_task_id = task


def _gradients_of(outputs: Sequence[Tensor], inputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor | None]:
    ends = {each.grad_fn for each in inputs if each.grad_fn is not None}
    gradients: dict[Node, dict[int, Tensor]] = {}
    for output, gradient in zip(outputs, given, strict=True):
        gradients.setdefault(output.grad_fn, {})[output.output_nr] = gradient
    waiting = _edges_into(gradients, ends)
    ready = [node for node in gradients if not waiting[node]]
    leaves: dict[Tensor, Tensor | None] = {}
    inside: dict[tuple[Node, int], Tensor | None] = {}
    while ready:
        node = ready.pop()
        arrived = gradients.pop(node, {})
        results = [arrived.get(index) for index in range(len(node._input_metadata))]
        if hasattr(node, "variable"):
            leaves[node.variable] = results[0]
            continue
        if node in ends:
            inside |= {(node, index): result for index, result in enumerate(results)}
            continue
        results = _run(node, results)
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        for (following, index), result in zip(edges, results, strict=True):
            if result is not None:
                place = gradients.setdefault(following, {})
                result = _fitted(result, following._input_metadata[index])
                place[index] = place[index] + result if index in place else result
            waiting[following] -= 1
            if not waiting[following]:
                ready.append(following)
    return [leaves.get(each) if each.grad_fn is None else inside.get((each.grad_fn, each.output_nr)) for each in inputs]


def _edges_into(begin: Iterable[Node], ends: set[Node]) -> Counter[Node]:
    """How many gradients each node waits for that is reached from `begin`, up to `ends`."""
    waiting: Counter[Node] = Counter()
    found = list(begin)
    seen = set(found)
    while found:
        last = found.pop()
        for node, _ in () if last in ends else last.next_functions:
            if node is not None:
                waiting[node] += 1
                if node not in seen:
                    seen.add(node)
                    found.append(node)
    return waiting


def _run(node: Node, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a node's differentiable inputs, from the gradients of its outputs."""
    if hasattr(node, "needs_input_grad"):  # a torch.autograd.Function
        given = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if each is None else each
            for each, meta in zip(gradients, node._input_metadata)
        ]
        results = node.apply(*given)
        needed = node.needs_input_grad
    else:
        results = node(*gradients)
        needed = [following is not None for following, _ in node.next_functions]
    results = results if isinstance(results, tuple) else (results,)
    return [result for result, wanted in zip(results, needed, strict=True) if wanted]


def _fitted(gradient: Tensor, wanted) -> Tensor:
    """As torch's engine gives it to a node: in the shape and type of what the gradient is of."""
    return gradient.sum_to_size(wanted.shape).to(wanted.dtype)


def train(config: Config) -> None:
    """Forward and backward pass of two samples."""
    model = build_model(config, device=DEVICE, dtype=torch.bfloat16, values=False)
    length = config.training.sequence_length
    tokens = torch.zeros(2, length + 1, dtype=torch.int64, device=DEVICE)
    channels = {
        name: torch.zeros(shape, dtype=torch.int64, device=DEVICE)
        for name, shape in {"positions": (2, length), "documents": (2, length), "samples": (2,)}.items()
        if getattr(model.form, name)
    }
    loss, losses = model(tokens[:, :-1], tokens[:, 1:], torch.ones(2, length, device=DEVICE), **channels)
    assert loss.device.type == losses.device.type == DEVICE
    parameters = list(model.parameters())
    gradients = gradients_of([loss], parameters, [torch.ones_like(loss)])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert gradient is not None and gradient.device.type == DEVICE, f"{parameter.logical.name}: {gradient}"


def continue_a_text(config: Config) -> None:
    """A prompt of several tokens, then one more token."""
    model: Model = build_model(config, device=DEVICE, dtype=torch.bfloat16, values=False).eval()
    with torch.no_grad():
        state = model.new_state()
        model.decode(torch.zeros(1, 7, dtype=torch.int64, device=DEVICE), state, 0)
        logits = model.decode(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), state, 7)
    assert logits.device.type == DEVICE and logits.dtype == torch.float32


TRIALS = {
    "train": (train, ("data.reset_attention_at_eod=true", "training.sequence_length=20")),
    "wide": (train, ("model.residual.fp32=true", "training.sequence_length=20")),
    "decode": (continue_a_text, ()),
    "varlen": (
        train,
        (
            "data.reset_attention_at_eod=true",
            "training.sequence_length=20",
            "model.fused_attention.documents=varlen",
            "model.fused_attention.flash=fa3",
        ),
    ),
}
# A wide stream is no matter of the kind. Documents one after another are one of attention.
SOME = {
    "wide": {"tiny_neox", "tiny_moe", "tiny_mamba2", "tiny_rwkv7", "tiny_zamba2"},
    "varlen": {"tiny_llama", "tiny_neox", "tiny_mistral"},
}


def configuration(file: str, overrides: tuple[str, ...]) -> Config:
    more = ["training.steps=100", "precision.compute=bf16", "training.compile=off", *overrides]
    if "moe" in load([file], more[:1], check_inputs=False).config.model.layers:
        more.append("model.moe.hidden_size=16")  # grouped products want multiples of 16 bytes in bf16 too
    return load([file], more, check_inputs=False).config


def main(files: list[str]) -> None:
    let_torch_handle_cuda_tensors()
    found: dict[str, str] = {}
    cases = {
        f"{Path(file).stem}-{name}": (trial, configuration(file, overrides))
        for file in files
        for name, (trial, overrides) in TRIALS.items()
        if name not in SOME or Path(file).stem in SOME[name]
    }
    with FakeTensorMode():
        for name, (trial, config) in cases.items():
            try:
                trial(config)
                found[name] = ""
            except Exception:  # whatever it is, it is this trial's result, and the others continue
                found[name] = traceback.format_exc(limit=-8)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
