"""Decoded tokens stay with their experts: one exchange of rows a layer in place of two (ExFlow, Yao et al. 2024).

Every rank has the keys and values of all texts, and plans the same passes. Before the experts of a layer, each token's
row of the residual stream goes to the rank of its best expert. The next layer continues there, since the keys that it
attends to are there too. Rows of a token's other experts go from there and back. At the end of a pass the ranks gather
the last rows, and the new keys and values of all layers. The experts of a layer may be on any ranks (`placement.py`).

A pass with several tokens of one text needs the keys of earlier ones in each layer. There the texts are divided over
the ranks, and rows return after each layer.

Shapes: T tokens of a pass, n of this rank, H hidden, E experts, k experts of a token, G ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.config.problems import UserError
from megatron.kinds.common.attention.key_value_cache import KeyValueCache
from megatron.kinds.common.attention.paged_keys import PagedKeys, Pass
from megatron.model.block import Block
from megatron.model.embedding_and_head import Reader
from megatron.model.stack import Model
from megatron.model.stream import LOSS, Stream
from megatron.parallel.layers.collectives import exchange

from .dispatch import AllToAllDispatch, LocalDispatch
from .layer import MoE
from .permute import Rows
from .placement import read_places
from .router import ExpertChoice


@dataclass
class Moved:
    """Counts of passes in which tokens stay, on this rank."""

    passes: int = 0  # passes, layers: number of passes, and of layers with experts in them
    layers: int = 0
    exchanges: int = 0  # all-to-alls of rows
    rows: int = 0  # rows of the stream that left this rank, and `others` those to a token's other experts and back
    others: int = 0
    gathered: int = 0  # bytes that this rank sent to the others at the ends of passes


@dataclass
class _Rows:
    """Rows of a pass."""

    whole: Pass  # all tokens, equal on all ranks
    home_T: Tensor  # the rank of each. `own` are the numbers of this rank's, rising.
    rank: int
    # The best expert of each of this rank's, by which it came here. The number of experts stands for none.
    best: Tensor | None = None
    own: list[int] = field(init=False)
    now: Pass = field(init=False)  # the pass of this rank's

    def __post_init__(self) -> None:
        self.own = (self.home_T == self.rank).nonzero().flatten().tolist()
        self.now = Pass([self.whole.tokens[at] for at in self.own], self.whole.device, self.whole.turns)

    def padded(self, x_nH: Tensor) -> Tensor:
        """[rows of the pass, 1, H]."""
        return F.pad(x_nH, (0, 0, 0, self.now.size - len(x_nH))).unsqueeze(1)


class _AtHome(LocalDispatch):
    """All rows are of experts of this rank, a run of them."""

    def __init__(self, begin: int, count: int) -> None:
        self.begin, self.end = begin, begin + count

    def send(self, rows_RH: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Any]:
        return rows_RH, rows.ends_E[self.begin : self.end].contiguous(), None


class _Counted(AllToAllDispatch):
    """Counts the rows that leave and return."""

    def __init__(self, like: AllToAllDispatch, moved: Moved) -> None:
        self.expert, self.tensor, self.slices, self.moved = like.expert, like.tensor, like.slices, moved

    def send(self, rows_RH: Tensor, rows: Rows) -> Any:
        found = super().send(rows_RH, rows)
        trip, rank = found[2], self.expert.rank
        self.moved.exchanges += 2
        self.moved.others += sum(trip.sent) - trip.sent[rank] + sum(trip.received) - trip.received[rank]
        return found


class Staying:
    """An engine for a decoder that all expert parallel ranks run with the same requests.

    Args:
        engine: of the model. Its ranks share nothing but experts.
        places: the experts of each rank, by the number of a layer. None: as they are.

    Attributes:
        moved: counts.
    """

    def __init__(self, engine: Any, places: Mapping[int, Sequence[Sequence[int]]] | None = None) -> None:
        self.engine, self.model = engine, cast(Model, engine.model)
        engine.state.for_evaluation()  # it writes weights, of experts in order
        self.axis, self.moved = self.model.plan.mesh.expert, Moved()
        self.layers = {at: block.ffn for at, block in enumerate(self._blocks()) if isinstance(block.ffn, MoE)}
        for at, each in self.layers.items():
            each.order = None
            if places is not None:
                place(each, places[at])

    @classmethod
    def of(cls, engine: Any, path: Path) -> "Staying":
        """With the placement of a file.

        Raises:
            UserError: the file has no placement of this model on these ranks, or the ranks share more than experts.
        """
        mesh, states = engine.model.plan.mesh, engine.new_state()
        alone = mesh.expert.size != mesh.replicas.size or mesh.layout.world_size != mesh.expert.size
        if alone or mesh.layout.gathers_experts:
            ranks = f"{mesh.expert.size} of {mesh.layout.world_size} ranks share experts"
            raise UserError(f"evaluation.placement: all ranks must share experts, and {ranks}: use parallel.expert")
        if not all(isinstance(each.mixer, KeyValueCache | None) for each in states):
            raise UserError("evaluation.placement must be with mixers that only keep keys and values")
        if more := sorted({name for each in engine.model.plan.live_channels for name in each} - {LOSS}):
            raise UserError(f"evaluation.placement must be with layers that send no {more[0]} to later layers")
        layers = {at: each.ffn for at, each in enumerate(engine.model.blocks) if isinstance(each.ffn, MoE)}
        return cls(engine, read_places(path, {at: moe.options.experts for at, moe in layers.items()}, mesh.expert.size))

    def _blocks(self) -> list[Block]:
        return list(self.model.blocks)

    @property
    def config(self) -> Any:
        return self.engine.config

    def new_state(self) -> list[Any]:
        return self.engine.new_state()

    @torch.no_grad()
    def read_on(self, tokens_T1: Tensor, reader: Reader, states: list[Any], begin: int | Tensor) -> Any:
        """As `WholeModel.read_on`, with the same tokens and the same result on all ranks."""
        self.model.eval()
        self.engine.state.for_evaluation()
        keys = {at: each.mixer for at, each in enumerate(states) if isinstance(each.mixer, PagedKeys)}
        current = next(iter(keys.values())).current
        whole = current.read
        slots = [each.slot for each in whole.tokens]
        stay = len(set(slots)) == len(slots)
        rows = _Rows(whole, self._first(slots), self.axis.rank)
        homes: dict[int, _Rows] = {}
        try:
            current.read = rows.now
            stream = self.model.continued(rows.now.ids_T1, rows.now.positions_T1)
            for at, (block, state) in enumerate(zip(self._blocks(), states)):
                homes[at], x = rows, stream.hidden
                if block.mixer is not None:
                    x, stream = block.mixed(x, stream, state)
                if stay and at in self.layers:
                    rows, stream = self._moved(block, x, rows)
                    current.read, x = rows.now, stream.hidden
                if at in self.layers:
                    state.ffn.plain = True  # decoding keeps nothing of experts, and all ranks make the same exchanges
                if block.ffn is not None:
                    with self._choosing(at, rows, stay):
                        x, stream = block.fed(x, stream, state)
                stream = block.scaled(stream.with_hidden(x))
        finally:
            current.read = whole
        self.moved.passes += stay
        hidden = self._gathered(stream.hidden, rows, homes, keys, whole)
        return self.model.head(Stream(hidden, whole.positions_T1), tokens_T1, tokens_T1, reader)

    def _first(self, slots: Sequence[int]) -> Tensor:
        """The rank of each token at the start of a pass: equal shares of the texts."""
        order = {slot: at for at, slot in enumerate(dict.fromkeys(slots))}
        return torch.tensor([order[slot] * self.axis.size // len(order) for slot in slots], dtype=torch.int64)

    def _moved(self, block: Block, x_n1H: Tensor, rows: _Rows) -> tuple[_Rows, Stream]:
        """The rows after each token has gone to the rank of its best expert."""
        moe, norm, n, T = cast(MoE, block.ffn), block.ffn_norm, len(rows.own), len(rows.whole.tokens)
        assert norm is not None
        stream = Stream(x_n1H, rows.now.positions_T1)
        best_n = moe.best(norm(x_n1H), stream)[:n].cpu()
        experts, rank = moe.options.experts, self.axis.rank
        said_T = torch.zeros(T, dtype=torch.int64)
        said_T[rows.own] = torch.where(best_n < experts, best_n, experts + rank)  # without an expert a token stays
        said_T = said_T.to(x_n1H.device)
        dist.all_reduce(said_T, group=self.axis.group)
        said_T = said_T.cpu()
        at_T = said_T if moe.order is None else moe.order.cpu()[said_T.clamp(max=experts - 1)]
        home_T = torch.where(said_T < experts, at_T * self.axis.size // experts, said_T - experts)
        new = _Rows(rows.whole, home_T, rank, said_T[home_T == rank].clamp(max=experts))
        mine_n = home_T[rows.own]
        order_n = torch.argsort(mine_n, stable=True)
        sent = torch.bincount(mine_n, minlength=self.axis.size).tolist()
        before = rows.home_T[new.own]
        received = torch.bincount(before, minlength=self.axis.size).tolist()
        got = exchange(x_n1H.squeeze(1)[order_n.to(x_n1H.device)], sent, received, self.axis)
        back_n = torch.argsort(torch.argsort(before, stable=True))  # rows came by rank, and are kept by number
        self.moved.layers += 1
        self.moved.exchanges += 1
        self.moved.rows += sum(sent) - sent[rank]
        return new, Stream(new.padded(got[back_n.to(got.device)]), new.now.positions_T1)

    @contextmanager
    def _choosing(self, at: int, rows: _Rows, stay: bool) -> Iterator[None]:
        """Rows of padding choose experts of this rank, and where one expert is chosen no row leaves."""
        if at not in self.layers:
            yield
            return
        moe, n = cast(Any, self.layers[at]), len(rows.own)
        plain, dispatch, share = moe.choose, moe.exchange, moe.options.experts // self.axis.size
        begin = share * self.axis.rank
        here = begin if moe.order is None else int((moe.order == begin).nonzero())
        home = stay and moe.options.top_k == 1 and not moe.options.router.skip

        def choose(logits_TE: Tensor, scores_TE: Tensor) -> ExpertChoice:
            experts_Tk = plain(logits_TE, scores_TE).of_tokens.clone()
            experts_Tk[n:] = here
            if home and rows.best is not None:  # by which it came, also where the rounding of a GPU differs by rows
                experts_Tk[:n, 0] = rows.best.to(experts_Tk.device)
            return ExpertChoice(experts_Tk)

        moe.choose = choose
        if stay:
            moe.exchange = _AtHome(begin, share) if home else _Counted(dispatch, self.moved)
        try:
            yield
        finally:
            moe.exchange = dispatch
            del moe.choose

    def _gathered(
        self, hidden_n1H: Tensor, rows: _Rows, homes: Mapping[int, _Rows], keys: Mapping[int, PagedKeys], whole: Pass
    ) -> Tensor:
        """The last rows of all ranks. Their keys and values are written here."""
        device, ranks = hidden_n1H.device, range(self.axis.size)
        pieces = [(rows, hidden_n1H.squeeze(1)[: len(rows.own)])]
        for at, each in keys.items():
            assert each.keys is not None and each.values is not None
            places = (homes[at].now.pages, homes[at].now.offsets)
            for pool in (each.keys, each.values):
                pieces.append((homes[at], pool[places[0], :, places[1]][: len(homes[at].own)]))
        widths = [part[0:0].new_empty(1, *part.shape[1:]).numel() * part.element_size() for _, part in pieces]
        sizes = [[int((own.home_T == rank).sum()) * width for (own, _), width in zip(pieces, widths)] for rank in ranks]
        mine = torch.cat([part.contiguous().view(-1).view(torch.uint8) for _, part in pieces])
        most = max(map(sum, sizes))
        everyone = mine.new_empty(self.axis.size * most)
        dist.all_gather_into_tensor(everyone, F.pad(mine, (0, most - len(mine))), group=self.axis.group)
        self.moved.gathered += (self.axis.size - 1) * len(mine)
        found = list[Tensor]()
        for number, (own, part) in enumerate(pieces):
            all_rows = part.new_zeros(whole.size, *part.shape[1:])
            for rank in ranks:
                begin = rank * most + sum(sizes[rank][:number])
                data = everyone[begin : begin + sizes[rank][number]].clone().view(part.dtype)
                all_rows[(own.home_T == rank).nonzero().flatten().to(device)] = data.view(-1, *part.shape[1:])
            found.append(all_rows)
        for each, k, v in zip(keys.values(), found[1::2], found[2::2]):
            each.write(whole, k, v)
        return found[0].unsqueeze(1)


def place(moe: MoE, experts: Sequence[Sequence[int]]) -> None:
    """Give each expert parallel rank these experts, where they are in order. All ranks call it.

    No other result of the layer changes."""
    axis = moe.mesh.expert
    for whole in moe.experts.parameters():
        everyone = whole.new_empty(axis.size * len(whole), *whole.shape[1:])
        dist.all_gather_into_tensor(everyone, whole.detach().contiguous(), group=axis.group)
        whole.data.copy_(everyone[torch.tensor(experts[axis.rank], device=whole.device)])
    order = [expert for own in experts for expert in own]
    moe.order = torch.tensor(order, device=next(moe.experts.parameters()).device).argsort()
