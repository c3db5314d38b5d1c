"""The outer state of a peer: common weights, velocity of the outer step, and what compression has kept.

Rank 0 holds whole tensors in host memory, so nothing depends on a layout. Checkpoints have them as tensors of their
own. The ranks' masters are gathered and set one tensor at a time."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.format.fragment import MASTER, TRAINED, Fragment
from megatron.config.problems import UserError
from megatron.engine.base import BaseEngine
from megatron.engine.part import EnginePart
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.shard import LogicalTensor, Role

from .options import DECOUPLED, SPARSE, interval, peers_of
from .outer import fragments_of, merged, mixed, outer_step, tree_mean
from .sparse import Sparse, accumulate, bytes_of, clipped_to_median, compress, decompress, kept, norm_of
from .whole import WholeTensors

THETA, VELOCITY, RESIDUAL = "outer_weights", "outer_velocity", "outer_residual"
PARTS = ("indices", "codes", "table")
_TYPES = {str(each): each for each in (torch.float32, torch.float64)}


class OuterState(EnginePart):
    """State of the outer steps.

    Attributes:
        round: rounds that were applied. Equal on all ranks.
        fresh: whether the common weights were not taken from the engine yet.
        jumps: (completed steps, next round) of rounds that were skipped since the last own contribution. With
            decoupled peers, of all rounds that were applied.
        received: completed steps when each fragment was last applied (decoupled).
        sent: completed steps at the last contribution (decoupled).
        states: by name of the state, then of the tensor. Empty on ranks above 0.
    """

    def attach(self, engine: BaseEngine) -> None:
        self.engine, self.own = engine, peers_of(engine.config)
        self.rank, self.whole = engine.mesh.rank, WholeTensors(engine.mesh, engine.device)
        owned = {each.tensor.name: (each.tensor, each.flat.dtype) for each in engine.state.owned()}
        owned |= {logical_of(each).name: (logical_of(each), each.dtype) for each in engine.state.buffers}
        found = {name: [list(tensor.shape), str(dtype)] for name, (tensor, dtype) in owned.items()}
        whole = {name: each for rank in engine.communicator.gather(found) for name, each in rank.items()}
        self.shapes = {name: tuple(shape) for name, (shape, _) in sorted(whole.items())}
        self.types = {name: _TYPES[dtype] for name, (_, dtype) in whole.items()}
        self.fragments = fragments_of(self.shapes, self.own.fragments)
        self.interval = interval(self.own)
        kinds = [THETA, *[VELOCITY] * (self.own.outer_momentum > 0), *[RESIDUAL] * (self.own.algorithm == SPARSE)]
        self.states = {kind: self._zeros() for kind in kinds} if self.rank == 0 else {}
        self.pending: dict[str, Tensor] = {}  # accumulated values of a contribution that is not decided
        self.restore({})
        engine.state.others.append(self._fragments)

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros(shape, dtype=self.types[name]) for name, shape in self.shapes.items()}

    def _fragments(self) -> Iterator[Fragment]:
        for kind, tensors in self.states.items():
            for name, values in tensors.items():
                own = LogicalTensor(f"{name}.{kind}", tuple(values.shape), Role.STATE, keep_fp32=True)
                yield Fragment(own, kind, 0, 1, 0, values.view(-1))

    def state(self) -> dict[str, Any]:
        own = {"received": self.received, "sent": self.sent} if self.own.algorithm == DECOUPLED else {}
        return {"round": self.round, "fresh": self.fresh, "jumps": self.jumps, **own}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.round, self.fresh = state.get("round", 0), state.get("fresh", True)
        self.jumps: list[list[int]] = [list(each) for each in state.get("jumps", ())]
        self.received: list[int] = [*state.get("received", [0] * len(self.fragments))]
        self.sent: int = state.get("sent", 0)
        self.pending.clear()

    def names(self, round: int) -> list[str]:
        """Tensors that a round exchanges."""
        return self.fragments[round % len(self.fragments)]

    def expected(self, round: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Tensors of a contribution."""
        if self.own.algorithm != SPARSE:
            return {name: (self.shapes[name], self.types[name]) for name in self.names(round)}
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name in self.names(round):
            count = kept(self.shapes[name], self.own.top)
            sizes = ((3 * count + 1) // 2, torch.uint8), ((count + 3) // 4, torch.uint8), (4, torch.float32)
            found |= {f"{name}:{part}": ((size,), dtype) for part, (size, dtype) in zip(PARTS, sizes)}
        return found

    def whole_state(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Tensors of a state in the folder: common weights and velocity. Residuals are each peer's own."""
        return {name: (tuple(each.shape), each.dtype) for name, each in self.to_publish().items()}

    def to_publish(self) -> dict[str, Tensor]:
        shared = {kind: each for kind, each in self.states.items() if kind != RESIDUAL}
        return {f"{name}.{kind}": values for kind, each in shared.items() for name, values in each.items()}

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        """Take a state of the folder."""
        for name, values in self.to_publish().items():
            values.copy_(state[name])

    def bytes_of_round(self, round: int) -> int:
        """Bytes of the values of a contribution."""
        shapes = [self.shapes[name] for name in self.names(round)]
        if self.own.algorithm == SPARSE:
            return sum(bytes_of(shape, self.own.top) for shape in shapes)
        return sum(torch.Size(self.shapes[name]).numel() * self.types[name].itemsize for name in self.names(round))

    def base(self, round: int) -> str:
        """Hash of the common weights that a round changes."""
        found = hashlib.sha256()
        for name in self.names(round):
            found.update(self.states[THETA][name].view(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def contribution(self, round: int, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This peer's contribution, from its weights."""
        theta, made = self.states[THETA], dict[str, Tensor]()
        for name in self.names(round):
            delta = theta[name] - local[name]
            if self.own.algorithm != SPARSE:
                made[name] = delta
                continue
            self.pending[name] = accumulate(self.states[RESIDUAL][name], delta, self.own.decay)
            sparse = compress(self.pending[name], self.own.top)
            made |= {f"{name}:{part}": getattr(sparse, part) for part in PARTS}
        return made

    def delta(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        """The difference of one tensor that a contribution has."""
        if self.own.algorithm != SPARSE:
            return tensors[name]
        return decompress(_sparse(tensors, name), self.shapes[name], self.own.top, self.types[name])

    def deltas(self, tensors: Mapping[str, Tensor], round: int) -> dict[str, Tensor]:
        """The differences that a contribution has."""
        return {name: self.delta(tensors, name) for name in self.names(round)}

    def common(self, round: int) -> dict[str, Tensor]:
        """A copy of the common weights that a round changes."""
        return {name: self.states[THETA][name].clone() for name in self.names(round)}

    def fits(self, tensors: Mapping[str, Tensor], round: int) -> bool:
        """Whether a contribution of the expected types can be decompressed."""
        if self.own.algorithm != SPARSE:
            return True
        return all(_sparse(tensors, name).fits(self.shapes[name], self.own.top) for name in self.names(round))

    def apply(
        self,
        round: int,
        contributions: Sequence[Mapping[str, Tensor]],
        mine: int | None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """The outer step of a round, on rank 0.

        Args:
            contributions: of all members, in the order of the line.
            mine: number of this peer's own among them.
            weights: of the contributions, in a merge of decoupled peers.
        """
        for name in self.names(round):
            deltas = [self.delta(each, name) for each in contributions]
            if name in self.pending:  # what was not sent stays. A contribution that the line does not name was not sent
                sent = deltas[mine] if mine is not None else 0
                self.states[RESIDUAL][name].copy_(self.pending[name] - sent)
            if self.own.algorithm == SPARSE:
                norms = [norm_of(_sparse(each, name), self.shapes[name], self.own.top) for each in contributions]
                deltas = clipped_to_median(deltas, norms)
            velocity = self.states[VELOCITY][name] if VELOCITY in self.states else None
            gradient = tree_mean(deltas) if weights is None else merged(name, deltas, weights)
            outer_step(self.states[THETA][name], velocity, gradient, self.own.outer_lr, self.own.outer_momentum)
        self.pending.clear()

    def gathered(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole masters on rank 0, on the host. All ranks call it."""
        held: dict[str, list[Fragment]] = {}
        for fragment in self.engine.state.fragments():
            if fragment.state == TRAINED:
                raise UserError("peers: the optimizer must evaluate the weights that it trains")
            if fragment.state == MASTER:
                held.setdefault(fragment.tensor.name, []).append(fragment)
        found = {}
        for name in names:
            whole = self.whole.gather(self.shapes[name], self.types[name], held.get(name, ()))
            if whole is not None:
                found[name] = whole
        return found

    def set_masters(self, names: Sequence[str], alpha: float = 0.0) -> None:
        """Replace masters by the common weights, with a share alpha of the masters. All ranks call it."""
        held: dict[str, list[Fragment]] = {}
        for fragment in self.engine.state.masters():
            held.setdefault(fragment.tensor.name, []).append(fragment)
        for name in names:
            theta = self.states[THETA][name] if self.rank == 0 else None
            for there, here in self.whole.spread(self.shapes[name], self.types[name], theta, held.get(name, ())):
                here.copy_(mixed(here, there.to(here.device), alpha))
        self.engine.state.refresh()


def _sparse(tensors: Mapping[str, Tensor], name: str) -> Sparse:
    return Sparse(*(tensors[f"{name}:{part}"] for part in PARTS))
