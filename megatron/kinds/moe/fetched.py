"""Experts outside of the device's memory while a model decodes (Speculating Experts, arXiv 2603.19289).

All experts of a layer are in host memory or in a mapped file, and some on the device. The least recently used expert
makes room for another. While the experts of a layer compute, the next layer's own router predicts that layer's experts,
and a thread copies these. It reads the state at hand: the stream before the layer's experts, plus their mean output. A
token uses the experts that its router chooses, so a prediction changes no result. With `speculate` it uses the
predicted experts, with weights from the router's scores, and no expert is copied late.

Shapes: T tokens of a pass, H hidden, R rows sorted by expert, E experts, k experts of a token."""

import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kinds.common.attention.paged_keys import PADDED
from megatron.model.block import Block
from megatron.model.stack import Model, ModelPlan

from .experts import Experts
from .layer import MoE
from .router import ExpertChoice, LinearRouter, scores_of


@dataclass(frozen=True)
class OutsidePlan(ModelPlan):
    """Builds a model whose experts are not on the device.

    Attributes:
        folder: for a file of each tensor of experts, which has no name and ends with the process. None: host memory.
    """

    folder: Path | None = None

    def block(self, index: int, shared: dict[str, nn.Module] | None = None) -> Block:
        block = super().block(index, shared)
        if isinstance(block.ffn, MoE) and index < len(self.blocks):
            for stacked in (block.ffn.experts.up, block.ffn.experts.down):
                for name, whole in list(stacked.named_parameters(recurse=False)):
                    setattr(stacked, name, self._outside(whole))
        return block

    def _outside(self, whole: nn.Parameter) -> nn.Parameter:
        """Memory of the same form, and the same logical tensor."""
        if self.folder is None:
            memory = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
        else:
            with tempfile.NamedTemporaryFile(dir=self.folder) as file:
                memory = torch.from_file(file.name, True, whole.numel(), dtype=whole.dtype).view(whole.shape)
        made = nn.Parameter(memory, requires_grad=False)
        vars(made).update(vars(whole))
        return made


class HeldExperts(nn.Module):
    """`MoE.experts` with places for some experts.

    Attributes:
        slots: expert -> its place, the least recently used first.
        used: experts of passes, each once a pass. `there` of them were in a place when their rows came.
        copies: experts copied to a place.
    """

    def __init__(self, experts: Experts, held: int, device: torch.device | str) -> None:
        super().__init__()
        self.experts, self.pairs = experts, list[tuple[Tensor, Tensor]]()
        for stacked in (experts.up, experts.down):
            for name, whole in list(stacked.named_parameters(recurse=False)):
                place = whole.new_zeros(min(held, len(whole)), *whole.shape[1:], device=device)
                setattr(stacked, name, nn.Parameter(place, requires_grad=False))
                self.pairs.append((whole.detach(), place))
        self.places, self.all = len(self.pairs[0][1]), len(self.pairs[0][0])
        self.slots: dict[int, int] = {}
        self.used = self.there = self.copies = 0
        self.before = self.ahead = lambda: None  # called before its experts are needed, and when they are there
        self.stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None

    @property
    def expert_bytes(self) -> int:
        return sum(place[0].numel() * place.element_size() for _, place in self.pairs)

    def hold(self, wanted: Collection[int]) -> None:
        """Have these experts in places, at most `places` of them."""
        for expert in wanted:
            slot = self.slots.pop(expert, None)
            if slot is None:
                slot = len(self.slots)
                if slot == self.places:
                    slot = self.slots.pop(next(each for each in self.slots if each not in wanted))
                for whole, place in self.pairs:
                    place[slot].copy_(whole[expert], non_blocking=True)
                self.copies += 1
            self.slots[expert] = slot

    def hold_ahead(self, wanted: Collection[int]) -> None:
        """`hold` in a thread, next to the device's computations."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            self.hold(wanted)
        if self.stream is not None:
            self.stream.synchronize()

    def forward(self, rows_RH: Tensor, ends_E: Tensor) -> Tensor:
        self.before()
        count_E = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
        used = sorted((each for each, rows in enumerate(count_E) if rows), key=lambda each: each not in self.slots)
        self.used += len(used)
        self.there += sum(each in self.slots for each in used)
        pieces = list(rows_RH.split(count_E))
        rounds = [used[at : at + self.places] for at in range(0, len(used), self.places)]
        for number, some in enumerate(rounds):
            self.hold(some)
            if number + 1 == len(rounds):
                self.ahead()
            self._compute(sorted(some, key=self.slots.__getitem__), count_E, pieces)
        return torch.cat(pieces)

    def _compute(self, some: Sequence[int], count_E: Sequence[int], pieces: list[Tensor]) -> None:
        """Replace the rows of these experts, in the order of their places, by their results.

        The last expert gets rows of padding, so that no vector of a kernel for CPUs is cut (`PADDED`)."""
        count_of = {self.slots[each]: count_E[each] for each in some}
        more = -sum(count_of.values()) % PADDED
        count_of[self.slots[some[-1]]] += more
        ends = list(accumulate(count_of.get(slot, 0) for slot in range(self.places)))
        rows = F.pad(torch.cat([pieces[each] for each in some]), (0, 0, 0, more))
        y = self.experts(rows, torch.tensor(ends, dtype=torch.int32, device=rows.device))
        for each, part in zip(some, y.split([*(count_E[each] for each in some), more])):
            pieces[each] = part


class _Layer:
    """A layer with experts.

    Attributes:
        x_T1H: the stream before its feed-forward, where its norm reads it. `mean_H` is what its block adds on average.
        guess_Tk: its predicted experts in this pass.
        choices: of tokens with a prediction. `right` of them were predicted.
    """

    def __init__(self, block: Block, held: int, device: torch.device | str) -> None:
        self.moe, self.norm = cast(MoE, block.ffn), block.ffn_norm
        self.router_choice = self.moe.choose
        self.held = HeldExperts(self.moe.experts, held, device)
        cast(Any, self.moe).experts = self.held
        self.seen = not block.post_norm and block.connections is None and self.norm is not None
        self.predictable = self.seen and isinstance(self.moe.router, LinearRouter) and self.moe.table is None
        self.x_T1H: Tensor | None = None
        self.guess_Tk: Tensor | None = None
        self.mean_H: Tensor | float = 0.0
        self.copying: Future[None] | None = None
        self.choices = self.right = 0

    def wait(self) -> None:
        if self.copying is not None:
            self.copying.result()
            self.copying = None


class Fetching:
    """Keeps the experts of a model outside of its device, from now on.

    Args:
        model: whole on this process. The decoder calls it.
        held: experts of each layer on the device, at least 1.
        speculate: use the predicted experts. The results are then others.
    """

    Plan = OutsidePlan

    def __init__(self, model: Model, held: int, speculate: bool = False) -> None:
        self.speculate, self.real = speculate, 0
        self.blocks = [each for each in model.blocks if isinstance(each.ffn, MoE)]
        self.layers = [_Layer(each, held, model.plan.device) for each in self.blocks]
        self._thread = ThreadPoolExecutor(1, "experts")
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for layer, following in zip(self.layers, [*self.layers[1:], None]):
            cast(Any, layer.moe).choose = partial(self._choose, layer)
            layer.held.before = layer.wait
            if layer.seen and following is not None and following.predictable:
                cast(nn.Module, layer.norm).register_forward_pre_hook(partial(self._keep, layer))
                layer.held.ahead = partial(self._predict, layer, following)

    def _begin(self, model: nn.Module, _: Any, words: dict[str, Any]) -> None:
        """Number of tokens of a pass of the decoder, whose other rows are padding."""
        self.real = 0
        for block, state in zip(cast(Model, model).blocks, words.get("state") or ()):
            if isinstance(block.ffn, MoE) and hasattr(state.ffn, "current"):
                state.ffn.plain = True  # experts keep nothing of earlier tokens: no turns
                self.real = len(state.ffn.current.read.tokens)

    @staticmethod
    def _keep(layer: _Layer, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        layer.x_T1H = inputs[0]

    def _padded(self, experts_Tk: Tensor) -> Tensor:
        """Padding has the experts of the first token, so that no expert is copied for it."""
        if 0 < self.real < len(experts_Tk):
            experts_Tk[self.real :] = experts_Tk[0]
        return experts_Tk

    def _choose(self, layer: _Layer, logits_TE: Tensor, scores_TE: Tensor) -> ExpertChoice:
        experts_Tk = self._padded(layer.router_choice(logits_TE, scores_TE).of_tokens)
        guess_Tk, layer.guess_Tk = layer.guess_Tk, None
        if guess_Tk is None:
            return ExpertChoice(experts_Tk)
        real = self.real or len(experts_Tk)
        layer.right += int((experts_Tk[:real, :, None] == guess_Tk[:real, None]).any(-1).sum())
        layer.choices += real * experts_Tk.shape[1]
        return ExpertChoice(guess_Tk if self.speculate else experts_Tk)

    @torch.no_grad()
    def _predict(self, layer: _Layer, following: _Layer) -> None:
        """Predict the following layer's experts, and begin to copy them."""
        x_T1H = layer.x_T1H
        assert x_T1H is not None and following.norm is not None
        logits_TE, _ = following.moe.router(following.norm((x_T1H + layer.mean_H).to(x_T1H.dtype)), cast(Any, None))
        scores_TE = scores_of(logits_TE, following.moe.options.router.score)
        following.guess_Tk = self._padded(following.router_choice(logits_TE, scores_TE).of_tokens)
        experts, count = following.guess_Tk.unique(return_counts=True)
        ranked = [each for each in experts[count.argsort(descending=True, stable=True)].tolist()]
        wanted = [each for each in ranked if each < following.held.all][: following.held.places]
        following.copying = self._thread.submit(following.held.hold_ahead, wanted)

    @torch.no_grad()
    def calibrate(self, model: Model, tokens_BS: Tensor) -> None:
        """Measure the mean outputs of the layers on these texts."""
        hooks = []
        for layer, block in zip(self.layers, self.blocks):

            def measure(_: nn.Module, inputs: Any, output: Any, layer: _Layer = layer) -> None:
                layer.mean_H = (output.hidden - cast(Tensor, layer.x_T1H)).flatten(0, -2).mean(0)

            if layer.seen:
                hooks += [
                    cast(nn.Module, layer.norm).register_forward_pre_hook(partial(self._keep, layer)),
                    block.register_forward_hook(measure),
                ]
        speculate, self.speculate = self.speculate, False
        model.eval().logits(tokens_BS)
        self.speculate = speculate
        for hook in hooks:
            hook.remove()
        for layer in self.layers:
            layer.wait()
            layer.choices = layer.right = layer.held.used = layer.held.there = layer.held.copies = 0

    def report(self) -> str:
        """Hit rates and bytes, as a sentence."""
        held = [each.held for each in self.layers]
        used, there = sum(each.used for each in held), sum(each.there for each in held)
        choices, right = sum(each.choices for each in self.layers), sum(each.right for each in self.layers)
        copied = sum(each.copies * each.expert_bytes for each in held)
        predicted = f", {right / choices:.1%} of {choices:,} choices were predicted" if choices else ""
        return (
            f"experts: {there / max(used, 1):.1%} of {used:,} were on the device when a pass came to them{predicted}, "
            f"{copied / 2**20:,.1f} MiB copied"
        )
