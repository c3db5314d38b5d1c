"""Sums over ranks in compressed form.

A tensor is cut into one part per rank. Each rank encodes its values of every part and sends it to the part's owner. The
owner adds them in fp32, encodes the sum, and sends it to all. So a value is rounded twice, for every number of ranks,
and every rank decodes the same bytes.

`int8_block` has blocks of 256 with the largest magnitude as 127. `top_k` sends the largest of every 32 values as they
are. Both keep their errors (the part that rounding and choice drop), and add them to the next values of the same tensor
(error feedback, Seide et al. 2014, Karimireddy et al. 2019, arXiv 1901.09847). So the sums of many steps differ from
exact ones by the last errors only. `bf16` and `fp16` only round, and keep no errors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.config.arithmetic.wire import BLOCK, FEEDS_BACK, SHARE, part_bytes, part_elements, row_block

from ..layout.mesh import Axis

Pair = tuple[Tensor, Tensor]
Nothing = tuple[None, None]
NOTHING: Nothing = (None, None)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def encode(wire: str, x_PE: Tensor, block: int = BLOCK) -> Tensor:
    """fp32 parts of a whole number of blocks to bytes, [P, bytes]."""
    parts = len(x_PE)
    if wire in TYPES:
        return x_PE.to(TYPES[wire]).view(torch.uint8).view(parts, -1)
    if wire == "int8_block":
        blocks = x_PE.view(parts, -1, block)
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        # where the scale is not finite, no value of the decoded block is
        values = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(0.0).round().clamp(-127, 127)
        return torch.cat(
            [scale.reshape(parts, -1).view(torch.uint8), values.to(torch.int8).view(parts, -1).view(torch.uint8)], 1
        )
    places = x_PE.abs().topk(x_PE.shape[1] // SHARE, 1, sorted=False).indices
    values = x_PE.gather(1, places)
    return torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)], 1)


def decode(wire: str, bytes_PB: Tensor, elements: int, block: int = BLOCK) -> Tensor:
    """The reverse of `encode`, with its errors: fp32 [P, elements]."""
    parts = len(bytes_PB)
    if wire in TYPES:
        return bytes_PB.contiguous().view(TYPES[wire]).float()
    cut = 4 * (elements // (block if wire == "int8_block" else SHARE))
    head, tail = bytes_PB[:, :cut].contiguous(), bytes_PB[:, cut:].contiguous()
    if wire == "int8_block":
        values = tail.view(torch.int8).view(parts, -1, block).float()
        return (values * head.view(torch.float32).unsqueeze(-1)).view(parts, -1)
    out = torch.zeros(parts, elements, device=bytes_PB.device)
    return out.scatter_(1, head.view(torch.int32).long(), tail.view(torch.float32))


class CompressedSum:
    """Sums in one form, with error feedback.

    A tensor is identified by its turn since `begin`: the same tensors must come in the same order every time.

    Args:
        wire: a form of `megatron.config.arithmetic.wire`, not none.
        feeds_back: whether it keeps errors. False where the tensors differ every time.
        undoable: whether a step may not be applied (`end`). Errors are then kept twice.
    """

    def __init__(self, wire: str, feeds_back: bool = True, undoable: bool = False) -> None:
        self.wire, self.feeds_back, self._undoable = wire, feeds_back and wire in FEEDS_BACK, undoable
        self.left_out: dict[tuple[int, int], Pair] = {}  # (turn, elements) -> [P, E] here, [E] owned
        self._next: dict[tuple[int, int], Pair] = {}  # the same after this step
        self._written: list[tuple[int, int]] = []  # keys of `_next` that this step wrote
        self._turn, self._keep, self._scale = 0, False, 1.0

    def begin(self, keep: bool = False, scale: float = 1.0) -> None:
        """Begin a step, with its first tensor.

        Args:
            keep: errors of earlier steps are added to its tensors, and stay as they are.
            scale: factor of the tensors of this step.
        """
        self._turn, self._keep = 0, keep
        self._written.clear()
        if scale != self._scale:
            for each in (tensor for pair in self.left_out.values() for tensor in pair):
                each *= scale / self._scale
            self._scale = scale

    def end(self, applied: bool) -> None:
        """End the step. A step that was not applied leaves no errors."""
        for key in self._written if applied else ():
            self.left_out[key], self._next[key] = self._next[key], self.left_out[key]
        self._written.clear()

    def forget(self) -> None:
        """Drop all errors: the run no longer has their steps."""
        self.left_out.clear()
        self._next.clear()

    def sum(self, flat: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """The sum of a flat tensor over a group, fp32 of the same size."""
        ranks, wire = dist.get_world_size(group), self.wire
        elements = part_elements(wire, flat.numel(), ranks)
        x_PE = torch.zeros(ranks * elements, device=flat.device)
        x_PE[: flat.numel()] = flat
        x_PE = x_PE.view(ranks, elements)
        (here, owned), (here_next, owned_next) = self._left_out(x_PE)
        sent = self._encoded(x_PE, here, here_next)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        mine = decode(wire, received, elements).sum(0, keepdim=True)
        part = self._encoded(mine, owned, owned_next)
        everyone = part.new_empty(ranks * part.shape[1])
        dist.all_gather_into_tensor(everyone, part.view(-1), group=group)
        self._turn += 1
        return decode(wire, everyone.view(ranks, -1), elements).view(-1)[: flat.numel()]

    def _left_out(self, x_PE: Tensor) -> tuple[Pair | Nothing, Pair | Nothing]:
        """Errors that are added to the tensor and to its sum, and the memory for their new errors."""
        if not self.feeds_back:
            return NOTHING, NOTHING
        key = self._turn, x_PE.numel()
        if key not in self.left_out:
            self.left_out[key] = torch.zeros_like(x_PE), torch.zeros_like(x_PE[:1])
        if self._keep:
            return self.left_out[key], NOTHING
        if not self._undoable:
            return self.left_out[key], self.left_out[key]
        if key not in self._next:
            self._next[key] = torch.empty_like(x_PE), torch.empty_like(x_PE[:1])
        self._written.append(key)
        return self.left_out[key], self._next[key]

    def _encoded(self, x_PE: Tensor, left_out: Tensor | None, after: Tensor | None) -> Tensor:
        if left_out is not None:
            x_PE += left_out
        sent = encode(self.wire, x_PE)
        if after is not None:
            torch.sub(x_PE, decode(self.wire, sent, x_PE.shape[1]), out=after)
            after.nan_to_num_(0.0, 0.0, 0.0)  # a step that overflows must not spoil all later ones
        return sent


def summed(x: Tensor, axis: Axis, wire: str) -> Tensor:
    """The sum over an axis, of the same shape and type on all its ranks."""
    return CompressedSum(wire, feeds_back=False).sum(x.reshape(-1), axis.group).to(x.dtype).view(x.shape)


def gathered(x: Tensor, axis: Axis, wire: str) -> Tensor:
    """[s, ...] of all ranks, one after the other: [t s, ...]."""
    sent = encode(wire, _padded(x.reshape(1, -1), wire))
    everyone = sent.new_empty(axis.size * sent.numel())
    dist.all_gather_into_tensor(everyone, sent.view(-1), group=axis.group)
    found = decode(wire, everyone.view(axis.size, -1), part_elements(wire, x.numel(), 1))[:, : x.numel()]
    return found.to(x.dtype).reshape(axis.size * x.shape[0], *x.shape[1:])


def scattered_sum(x: Tensor, axis: Axis, wire: str) -> Tensor:
    """[t s, ...] to this rank's [s, ...] of the sum over the ranks."""
    elements = x.numel() // axis.size
    sent = encode(wire, _padded(x.reshape(axis.size, -1), wire))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    found = decode(wire, received, part_elements(wire, elements, 1))[:, :elements].sum(0)
    return found.to(x.dtype).reshape(x.shape[0] // axis.size, *x.shape[1:])


def _padded(x_PE: Tensor, wire: str) -> Tensor:
    """fp32, with zeros up to whole blocks."""
    elements = x_PE.shape[1]
    return F.pad(x_PE.float(), (0, part_elements(wire, elements, 1) - elements))


class _Coded(torch.autograd.Function):
    """[B, E] to its message, [B, n], or the reverse. The gradient returns in the same form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _travelling(wire: str, block: int, x_BE: Tensor) -> Tensor:
    """A float tensor, since only floats have gradients between stages: the bytes of int8_block pass as fp32."""
    coded = encode(wire, x_BE.float().contiguous(), block)
    return coded.view(TYPES.get(wire, torch.float32))


def _arrived(wire: str, block: int, elements: int, dtype: torch.dtype, packed_Bn: Tensor) -> Tensor:
    return decode(wire, packed_Bn.contiguous().view(torch.uint8), elements, block).to(dtype)


def pack_rows(x: Tensor, wire: str, width: int) -> Tensor:
    """A tensor [B, ...] in the form of its message to another rank. Its gradient returns in the same form.

    Args:
        width: the elements of each sample are a multiple of it.
    """
    if wire == "none":
        return x
    x_BE, block = x.flatten(1), row_block(width)
    back = partial(_arrived, wire, block, x_BE.shape[1], x.dtype)
    return _Coded.apply(x_BE, partial(_travelling, wire, block), back)


def unpack_rows(packed: Tensor, wire: str, width: int, dtype: torch.dtype) -> Tensor:
    """The reverse of `pack_rows`, [B, elements of a sample]."""
    if wire == "none":
        return packed
    block, count = row_block(width), packed.shape[1]
    elements = count if wire in TYPES else 4 * count * block // (block + 4)
    return _Coded.apply(packed, partial(_arrived, wire, block, elements, dtype), partial(_travelling, wire, block))


def part_message(wire: str, elements: int, ranks: int) -> int:
    """Bytes (nccl-tests' S) of `gathered` and `scattered_sum` of this number of elements in all."""
    return ranks * part_bytes(wire, part_elements(wire, elements // ranks, 1))


def sum_messages(wire: str, elements: int, ranks: int) -> tuple[int, int]:
    """Bytes (nccl-tests' S) of the all-to-all, and of the all-gather, of a sum."""
    size = ranks * part_bytes(wire, part_elements(wire, elements, ranks))
    return size, size


def describe_wire(wire: str) -> str:
    """A line for the start of a run."""
    kept = ". Errors are added to the next step's gradients, and begin at zero now" if wire in FEEDS_BACK else ""
    return f"gradients travel between data parallel ranks as {wire}, and are summed in fp32{kept}"
