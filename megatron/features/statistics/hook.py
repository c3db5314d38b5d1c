"""Numbers by layer: norms of weights, gradients and updates, the size of outputs, the entropy of attention.

Norms of an update by layer: the weights after it, the gradient, and the change.

They are taken around the `step` of the torch optimizer, from the ranges of logical tensors that a rank owns there.
DeepSpeed calls it once, or once per parameter group (ZeRO 1 to 3). An element on several ranks is counted by the rank
that saves it, so the sums over all ranks equal one process's.

If an optimizer evaluates other weights than it trains (schedule-free), weights and update are of the evaluated and
saved ones. The gradient is that at the trained ones."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.engine.state import EngineState, Owned
from megatron.kinds.common.attention.entropy import AttentionEntropy
from megatron.model.block import Block
from megatron.model.embedding_and_head import Embedding
from megatron.parallel.layers.parameters import logical_of
from megatron.training.exchange import StepReport
from megatron.training.hook import Hook, HookContext
from megatron.training.trainer import Trainer

from .options import LOGGING

WEIGHT, GRADIENT, UPDATE = "weight", "gradient", "update"
KINDS = (WEIGHT, GRADIENT, UPDATE)


def layer_of(name: str) -> str:
    """The layer of a logical tensor: `layers.3`, or the first word (`embedding`, `head`)."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "layers" else words[0]


class UpdateStatistics:
    """Squares of an update's norms, of this rank's elements.

    Args:
        optimizer: the torch optimizer that DeepSpeed steps.

    Attributes:
        layers: of this rank's tensors, in their order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state: EngineState) -> None:
        self._state = state
        self.layers = list(dict.fromkeys(layer_of(owned.tensor.name) for owned in state.owned()))
        self._own: dict[int, list[Owned]] | None = None
        self._before: list[Tensor] = []
        self._squares: dict[tuple[str, str], Tensor] = {}
        optimizer.register_step_pre_hook(self._pre)
        optimizer.register_step_post_hook(self._post)

    def begin(self) -> None:
        self._squares = {}
        self._own = {}
        for owned in self._state.owned():
            if not owned.replica:
                self._own.setdefault(id(owned.flat), []).append(owned)

    def finish(self) -> dict[tuple[str, str], Tensor]:
        """The squares by (layer, kind), float64 0-d. The gradient is that after clipping."""
        self._own, self._before = None, []
        return self._squares

    @torch.no_grad()
    def _pre(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._own is None:
            return
        for group, flat in _flats(optimizer):
            for owned in self._own.get(id(flat), ()):
                self._add(owned, GRADIENT, owned.view(flat.grad) if flat.grad is not None else None)
            evaluated = _evaluated(optimizer, group, flat)
            self._before.append(flat.detach().clone() if evaluated is None else evaluated)

    @torch.no_grad()
    def _post(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._own is None:
            return
        for (group, flat), before in zip(_flats(optimizer), self._before, strict=True):
            evaluated = _evaluated(optimizer, group, flat)
            after = flat if evaluated is None else evaluated
            for owned in self._own.get(id(flat), ()):
                self._add(owned, WEIGHT, owned.view(after))
                self._add(owned, UPDATE, owned.view(after) - owned.view(before))
        self._before = []

    def _add(self, owned: Owned, kind: str, values: Tensor | None) -> None:
        if values is not None:
            at = layer_of(owned.tensor.name), kind
            square = torch.linalg.vector_norm(values, dtype=torch.float64).square()
            self._squares[at] = self._squares[at] + square if at in self._squares else square


def _flats(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Mapping[str, Any], Tensor]]:
    for group in optimizer.param_groups:
        for flat in group["params"]:
            yield group, flat


def _evaluated(optimizer: Any, group: Mapping[str, Any], flat: Tensor) -> Tensor | None:
    """The evaluation weights, if they differ from the trained ones: not before the first step."""
    if not hasattr(optimizer, "evaluation_weights") or not optimizer.state.get(flat):
        return None
    return optimizer.evaluation_weights(group, flat, optimizer.state[flat])


ACTIVATION, ENTROPY = "activation", "attention_entropy"


class StatisticsHook(Hook):
    """Adds `statistics` to the record of every n-th step: layer -> numbers.

    `weight` and `update` are norms over the layer's tensors after and of the step's update. `gradient` is the norm of
    the mean over the global batch before clipping. `activation` is the root mean square of the layer's output (the
    residual stream after it) over the tokens of the batch. `attention_entropy`, of layers with softmax attention, is
    the mean over tokens and heads, in nats. All are sums over the elements of logical tensors and tokens, independent
    of the layout. A step without an update has only the last two. The computation itself is not changed.

    Args:
        every: n.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._updates: UpdateStatistics | None = None
        self._layers: list[str] = []
        self._outputs: dict[str, list[Tensor]] | None = None  # layer -> squares of elements, and their number
        self._entropies: list[tuple[str, AttentionEntropy]] = []

    @classmethod
    def of(cls, parts: HookContext) -> "StatisticsHook | None":
        every = LOGGING.of(parts.config).statistics
        return None if every is None else cls(every)

    def on_start(self, trainer: Trainer) -> None:
        engine: Any = trainer.engine
        self._updates = UpdateStatistics(engine.optimizer, engine.state)
        for each in trainer.engine.module.modules():
            if isinstance(each, (Block, Embedding)):
                name = layer_of(logical_of(next(each.parameters())).name)
                each.register_forward_hook(self._observer(name))
            entropy = getattr(each, "entropy", None)
            if isinstance(entropy, AttentionEntropy):
                self._entropies.append((layer_of(logical_of(next(each.parameters())).name), entropy))
        named = [self._updates.layers]
        if trainer.mesh.layout.world_size > 1:
            named = [[] for _ in range(trainer.mesh.layout.world_size)]
            dist.all_gather_object(named, self._updates.layers)
        self._layers = sorted({layer for each in named for layer in each}, key=_place)

    def before_step(self, trainer: Trainer, step: int) -> None:
        if step % self._every == 0 and self._updates is not None:
            self._updates.begin()
            self._outputs = {}
            for _, entropy in self._entropies:
                entropy.begin()

    def after_step(self, trainer: Trainer, step: int, report: StepReport) -> None:
        outputs, self._outputs = self._outputs, None
        if outputs is None or self._updates is None:
            return
        squares = self._updates.finish()
        values: list[Any] = [squares.get((layer, kind), 0.0) for layer in self._layers for kind in KINDS]
        values += [number for layer in self._layers for number in outputs.get(layer, (0.0, 0.0))]
        values += self._entropy_sums()
        sums = trainer.exchange.sum(values).tolist()
        count = len(KINDS) * len(self._layers)
        found: dict[str, dict[str, float]] = {layer: {} for layer in self._layers}
        if report.result.updated:
            _put_norms(found, sums[:count], report.grad_norm)
        for number, layer in enumerate(self._layers):
            square, elements = sums[count + 2 * number : count + 2 * number + 2]
            if elements:
                found[layer][ACTIVATION] = math.sqrt(square / elements)
            total, queries = sums[count + 2 * (len(self._layers) + number) :][:2]
            if queries:
                found[layer][ENTROPY] = total / queries
        trainer.extra_metrics["statistics"] = found

    def _entropy_sums(self) -> list[Any]:
        """Of each layer the sum over its queries, and their number."""
        sums: dict[str, list[Any]] = {layer: [0.0, 0.0] for layer in self._layers}
        for layer, entropy in self._entropies:
            total, queries = entropy.finish()
            sums[layer] = [sums[layer][0] + total, sums[layer][1] + queries]
        return [number for pair in sums.values() for number in pair]

    def _observer(self, layer: str) -> Any:
        @torch.no_grad()
        def observe(module: nn.Module, inputs: Any, stream: Any) -> None:
            if self._outputs is not None and module.training:
                hidden = stream.hidden.detach()
                own = self._outputs.setdefault(layer, [torch.zeros((), dtype=torch.float64, device=hidden.device)] * 2)
                own[0] = own[0] + torch.linalg.vector_norm(hidden, dtype=torch.float64).square()
                own[1] = own[1] + hidden.numel()

        return observe


def _put_norms(found: dict[str, dict[str, float]], squares: list[float], grad_norm: float | None) -> None:
    """Norms from sums of squares. The optimizer's gradient may have been clipped, all of it by one factor, so the
    norm before clipping gives the layers' norms before it."""
    table = {
        (layer, kind): math.sqrt(squares[len(KINDS) * number + place])
        for number, layer in enumerate(found)
        for place, kind in enumerate(KINDS)
    }
    whole = math.sqrt(sum(value**2 for (_, kind), value in table.items() if kind == GRADIENT))
    factor = grad_norm / whole if grad_norm is not None and whole > 0 else 1.0
    for (layer, kind), value in table.items():
        found[layer][kind] = value * factor if kind == GRADIENT else value


def _place(layer: str) -> tuple[int, int, str]:
    """The embedding first, then the layers by their numbers, then the rest."""
    word, _, number = layer.partition(".")
    return (0 if word == "embedding" else 1 if word == "layers" else 2, int(number or 0), layer)
