"""Gradients of a step's slots, and the update by their sum.

DeepSpeed computes each slot as a step of its own: forward, backward, sums over the peer's ranks. Its call of the torch
optimizer's `step` is where the gradients of the masters are complete, in every ZeRO stage and in the pipeline. They are
kept there, and nothing is updated. Once the gradients of all slots are known, the same `step` gets their mean. Whole
gradients are on rank 0, in host memory, so nothing depends on the layout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import fsum
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format.fragment import Fragment
from megatron.config.problems import UserError
from megatron.engine.base import BaseEngine
from megatron.engine.optimizers.groups import set_learning_rate
from megatron.engine.part import EnginePart, Update
from megatron.engine.state import Owned
from megatron.parallel.layout.precision import TYPES, type_name

from .messages import digest
from .outer import tree_sum
from .rounds import Offered
from .whole import WholeTensors

GRADIENT = "gradient"


class SlotGradients(EnginePart):
    """Takes gradients from the engine's steps, and makes the update.

    Attributes:
        round: steps that were applied. Equal on all ranks.
        chain: hash of all that the weights follow from. Empty in a new run, until `begin`.
    """

    def before_deepspeed(self, engine: BaseEngine) -> None:
        """Take over the optimizer's `step`, and clipping: the norm is that of the sum."""
        optimizer, self._found = engine.optimizer, dict[Tensor, Tensor]()
        self._update, engine.clips = optimizer.step, False

        def step(closure: Any = None) -> None:
            for group in optimizer.param_groups:
                for flat in group["params"]:
                    if flat.grad is not None:
                        self._found[flat] = flat.grad.detach().clone(memory_format=torch.contiguous_format)

        taken: Any = optimizer  # this object, not its class
        taken.step = step

    def attach(self, engine: BaseEngine) -> None:
        self.engine, self.rank = engine, engine.mesh.rank
        if engine.state.buffers:
            raise UserError(
                "peers.algorithm: gradients must train a model without tensors that each step corrects, such as the "
                "correction of a router. Use another balance of experts, or peers.algorithm=diloco"
            )
        zero = engine.deepspeed.optimizer
        if hasattr(zero, "clip_grad"):
            zero.clip_grad = 0.0
        self.talk, self.whole = engine.communicator, WholeTensors(engine.mesh, engine.device)
        owned = engine.state.owned()
        own = {each.tensor.name: [list(each.tensor.shape), type_name(each.flat.dtype)] for each in owned}
        self.shapes = _merged(self.talk.gather(own))
        self.form = {name: (tuple(shape), TYPES[dtype]) for name, (shape, dtype) in self.shapes.items()}
        self.restore({})

    @property
    def trial(self) -> bool:
        return True  # each slot is: the update comes later

    def after_update(self, update: Update) -> Mapping[str, Any]:
        update.applied = False
        return {}

    def state(self) -> dict[str, Any]:
        return {"round": self.round, "chain": self.chain}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.round, self.chain = state.get("round", 0), state.get("chain", "")

    def _parts(self, values: Callable[[Owned], Tensor | None], replicas: bool = False) -> dict[str, list[Fragment]]:
        """This rank's parts of flat tensors of the masters' form, by name."""
        found: dict[str, list[Fragment]] = {}
        for each in self.engine.state.owned():
            if (replicas or not each.replica) and (flat := values(each)) is not None:
                part = Fragment(each.tensor, GRADIENT, *each.cut, each.start, each.view(flat))
                found.setdefault(each.tensor.name, []).append(part)
        return found

    def _gathered(self, parts: Mapping[str, list[Fragment]]) -> Iterator[tuple[str, Tensor]]:
        for name, (shape, dtype) in self.form.items():
            whole = self.whole.gather(shape, dtype, parts.get(name, ()))
            if whole is not None:
                yield name, whole

    def hash_of_weights(self) -> str:
        """Hash of all masters. All ranks call it."""
        self.engine.state.masters()  # waits for gathers, and restores the weights of training
        wholes = self._gathered(self._parts(lambda each: each.flat.detach()))
        hashes = [digest(whole.reshape(-1).view(torch.uint8).numpy().data) for _, whole in wholes]
        found: str = self.talk.broadcast(digest(" ".join(hashes).encode()))
        return found

    def take(self) -> dict[str, Tensor]:
        """The gradient of the last step, on rank 0. All ranks call it."""
        found = dict(self._gathered(self._parts(lambda each: self._found.get(each.flat))))
        self._found.clear()
        return found

    def mean(self, slots: int, offers: Mapping[int, Offered]) -> tuple[dict[str, Tensor], float, float]:
        """On rank 0: the mean gradient over the labels of the slots, its norm before clipping, and the labels' weight.
        It is clipped in place."""
        weights = {slot: facts["weight"] for slot, (facts, _) in offers.items()}
        total = fsum(weights.values())
        found, squares = {}, []
        for name in self.form if total else ():
            terms = [offers[slot][1][name] * weights[slot] if slot in offers else None for slot in range(slots)]
            whole = tree_sum(terms)
            assert whole is not None
            found[name] = whole / total
            squares.append(float(found[name].double().square().sum()))
        norm, limit = fsum(squares) ** 0.5, self.engine.config.optimizer.gradient_clipping
        if limit > 0 and norm + 1e-6 > limit:
            for each in found.values():
                each.mul_(limit / (norm + 1e-6))
        return found, norm, total

    def apply(self, gradient: Mapping[str, Tensor], lr: float) -> None:
        """Update by a gradient, which rank 0 has. All ranks call it."""
        engine, state = self.engine, self.engine.state
        state.masters()  # waits for gathers, restores training weights and creates the optimizer's states
        set_learning_rate(engine.optimizer, lr)
        given = {flat: torch.zeros_like(flat) for _, flat in state.flats()}
        held = self._parts(lambda each: given[each.flat], replicas=True)
        for name, (shape, dtype) in self.form.items():
            for there, here in self.whole.spread(shape, dtype, gradient.get(name), held.get(name, ())):
                here.copy_(there)
        for groups in self._steps():
            for group in groups:
                for flat in group["params"]:
                    flat.grad = given[flat]
            self._update()
        for flat in given:
            flat.grad = None
        state.refresh()

    def _steps(self) -> Iterator[list[dict[str, Any]]]:
        """Set the optimizer's groups for each call of its `step`: all at once, and at ZeRO 3 one tensor at a time, as
        DeepSpeed does. Restores them."""
        optimizer, state = self.engine.optimizer, self.engine.state
        if state.stage < 3:
            yield optimizer.param_groups
            return
        before = [group["params"] for group in optimizer.param_groups]
        for group, flat in [*state.flats()]:
            for each in optimizer.param_groups:
                each["params"] = []
            group["params"] = [flat]
            yield [group]
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The whole state on rank 0, in host memory: tensors by "state name", and numbers. All ranks call it."""
        held = _by_key(self.engine.state.fragments())
        own = {key: [list(each[0].tensor.shape), type_name(each[0].data.dtype)] for key, each in held.items()}
        found = {}
        for key, (shape, dtype) in _merged(self.talk.gather(own)).items():
            whole = self.whole.gather(shape, TYPES[dtype], held.get(key, ()))
            if whole is not None:
                found[key] = whole
        return found, self.engine.undo.kept()

    def install(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Take a `snapshot`, which rank 0 has. All ranks call it.

        Raises:
            UserError: it has other tensors.
        """
        held = _by_key(self.engine.state.targets())
        own = {key: [list(each[0].tensor.shape), type_name(each[0].data.dtype)] for key, each in held.items()}
        wanted = _merged(self.talk.gather(own))
        theirs = {key: [list(each.shape), type_name(each.dtype)] for key, each in tensors.items()}
        if self.talk.broadcast(theirs) != wanted:
            raise UserError("the state of another peer must have the tensors of this run. Check that their runs agree")
        for key, (shape, dtype) in wanted.items():
            for there, here in self.whole.spread(shape, TYPES[dtype], tensors.get(key), held.get(key, ())):
                here.copy_(there)
        self.engine.undo.restore(self.talk.broadcast(numbers))
        self.engine.state.refresh()


def _merged(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return dict(sorted({key: each for rank in ranks for key, each in rank.items()}.items()))


def _by_key(fragments: Iterator[Fragment] | Sequence[Fragment]) -> dict[str, list[Fragment]]:
    found: dict[str, list[Fragment]] = {}
    for each in fragments:
        found.setdefault(f"{each.state} {each.tensor.name}", []).append(each)
    return found
