"""Checks of a class of transformers that is cut: its logits and gradients equal the uncut class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .outline import ANY, Stages, Window, hidden_of, refused, stack_of
from .probe import SMALL, TOKENS, output_of, read, same


def tokens_of(model: PreTrainedModel) -> Tensor:
    """Int64 [2, TOKENS]."""
    return (torch.arange(2 * TOKENS).view(2, TOKENS) * 5 + 1) % output_of(model).weight.shape[0]


def checked(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters whose gradients are compared: of a large model, vectors."""
    parameters = list(model.parameters())
    small = sum(each.numel() for each in parameters) < SMALL
    return [each for each in parameters if each.requires_grad and (small or each.ndim < 2)]


def gradients(y: Tensor, parameters: list[nn.Parameter], graph: bool = False) -> list[Tensor | None]:
    """Of a sum of an output, in which each element has another weight."""
    weights = torch.sin(torch.arange(y.numel(), dtype=y.dtype, device=y.device)).view_as(y)
    return list(torch.autograd.grad((y * weights).sum(), parameters, retain_graph=graph, allow_unused=True))


def stages_of(model: PreTrainedModel, bounds: list[tuple[int, int]]) -> Stages:
    """The class, ready to be cut into these runs of blocks, which were compared with the whole.

    Args:
        model: on the host, whole, in fp32.

    Raises:
        FactsError: it is another function when it is cut.
    """
    name, blocks = stack_of(model)
    stages, was_training = Stages(model, name, blocks), model.training
    model.eval()
    try:
        with torch.enable_grad():
            _check(stages, bounds)
    except (RuntimeError, AttributeError, TypeError, IndexError, ValueError, KeyError) as error:
        # FactsError is a ValueError, and the class may raise any of these
        if hasattr(error, "rule"):
            raise
        raise refused(model, f"cannot run a part of {name}: {type(error).__name__}: {str(error)[:200]}") from error
    finally:
        model.train(was_training)
    return stages


def _check(stages: Stages, bounds: list[tuple[int, int]]) -> None:
    model, inputs, outputs = stages.model, list[Any](), list[Any]()

    def called(_: nn.Module, args: tuple[Any, ...], more: dict[str, Any], output: Any) -> None:
        inputs.append(hidden_of(args, more))
        outputs.append(output)

    hooks = [block.register_forward_hook(called, with_kwargs=True) for block in stages.blocks]
    tokens, parameters = tokens_of(model), checked(model)
    try:
        logits = read(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    width = output_of(model).weight.shape[1]
    kinds = {len(each) if isinstance(each, tuple) else 0 for each in outputs}
    if len(inputs) != len(stages.blocks) or len(kinds) != 1:
        raise refused(model, f"must call each block of {stages.name} once, and calls {len(inputs)}")
    if any(not isinstance(each, Tensor) or each.shape != (*tokens.shape, width) for each in inputs):
        raise refused(model, f"has a stream of another form than [batch, sequence, {width}] in {stages.name}")
    (stages.outputs,) = kinds
    wanted = gradients(logits, parameters)
    _find_users(stages, tokens)
    x: Any = None
    for start, stop in bounds:
        window = Window(start, stop, len(stages.blocks))
        with stages.installed(window):
            x = window.through(_call(model, tokens if start == 0 else torch.full_like(tokens, ANY)), x)
        if stop < len(stages.blocks) and not same(x, inputs[stop]):
            raise refused(model, f"computes something else in a part of its blocks, before {stages.name}.{stop}")
    if not same(x, logits):
        raise refused(model, f"has other logits with stages of {stages.name}")
    names = {id(each): name for name, each in model.named_parameters()}
    for parameter, found, whole in zip(parameters, gradients(x, parameters), wanted, strict=True):
        if whole is not None and (found is None or not same(found, whole)):
            raise refused(model, f"has other gradients of {names[id(parameter)]} with stages")


def _call(model: PreTrainedModel, tokens: Tensor) -> Callable[[], Tensor]:
    return lambda: read(model, tokens)


def _find_users(stages: Stages, tokens: Tensor) -> None:
    """Which stages use the parameters outside of blocks."""
    model, outside, count = stages.model, stages.outside(), len(stages.blocks)
    everything = {id(each) for each in outside.values()}
    used = []
    stages.first = stages.last = everything  # no stand-ins for parameters
    for start, stop in ((0, 1), (count - 1, count)):
        window = Window(start, stop, count)
        x = None if start == 0 else torch.ones(*tokens.shape, output_of(model).weight.shape[1], requires_grad=True)
        with stages.installed(window):
            y = window.through(_call(model, tokens), x)
        found = gradients(y, list(outside.values()))
        used.append({id(each) for each, gradient in zip(outside.values(), found) if gradient is not None})
    head = output_of(model).weight
    table = getattr(model.get_input_embeddings(), "weight", None)
    for name, each in outside.items():
        if id(each) in used[0] & used[1] and not (each is head and each is table):
            raise refused(model, f"uses {name} in several stages")
    stages.last = used[1]
    stages.first = used[0] | (everything - used[1])  # also what no stage uses
