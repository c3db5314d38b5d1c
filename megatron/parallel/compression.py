"""Sums over ranks that travel in fewer bytes than they have.

A tensor is cut into as many parts as there are ranks. Each rank encodes its values of every part and sends it to the
part's owner; the owner adds them in fp32, encodes the sum, and sends it to all. So a value is rounded twice, whatever
the number of ranks, and every rank decodes the same bytes.

`int8_block` has blocks of 256 with the largest magnitude as 127; `top_k` sends the largest of every 32 values as they
are. What these leave out is kept where it was left out, and added to the next values of the same tensor (error
feedback; Seide et al. 2014, Karimireddy et al. 2019, arXiv 1901.09847), so that what is sent over many steps adds up to
what should have been. `bf16` and `fp16` only round, and keep nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.wire import BLOCK, FEEDS_BACK, SHARE, part_bytes, part_elements

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def encode(wire: str, x_PE: Tensor) -> Tensor:
    """fp32 parts of a whole number of blocks to bytes, [P, bytes]."""
    parts = len(x_PE)
    if wire in TYPES:
        return x_PE.to(TYPES[wire]).view(torch.uint8).view(parts, -1)
    if wire == "int8_block":
        blocks = x_PE.view(parts, -1, BLOCK)
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        # where it is no number, the scale says so for the whole block
        values = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(0.0).round().clamp(-127, 127)
        return torch.cat(
            [scale.reshape(parts, -1).view(torch.uint8), values.to(torch.int8).view(parts, -1).view(torch.uint8)], 1
        )
    places = x_PE.abs().topk(x_PE.shape[1] // SHARE, 1, sorted=False).indices
    values = x_PE.gather(1, places)
    return torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)], 1)


def decode(wire: str, bytes_PB: Tensor, elements: int) -> Tensor:
    """What `encode` was given, as far as it kept it: fp32 [P, elements]."""
    parts = len(bytes_PB)
    if wire in TYPES:
        return bytes_PB.contiguous().view(TYPES[wire]).float()
    cut = 4 * (elements // (BLOCK if wire == "int8_block" else SHARE))
    head, tail = bytes_PB[:, :cut].contiguous(), bytes_PB[:, cut:].contiguous()
    if wire == "int8_block":
        values = tail.view(torch.int8).view(parts, -1, BLOCK).float()
        return (values * head.view(torch.float32).unsqueeze(-1)).view(parts, -1)
    out = torch.zeros(parts, elements, device=bytes_PB.device)
    return out.scatter_(1, head.view(torch.int32).long(), tail.view(torch.float32))


class CompressedSum:
    """Sums in one form, with what was left out of earlier ones.

    Tensors are told apart by their turn since `begin`: the same ones must come in the same order every time.

    Args:
        wire: a form of `megatron.config.wire`, but not none.
    """

    def __init__(self, wire: str) -> None:
        self.wire = wire
        self.left_out: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (turn, elements) -> [P, E] here, [E] owned
        self._turn = 0

    def begin(self) -> None:
        """The tensors of a step come, from the first one on."""
        self._turn = 0

    def sum(self, flat: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """The sum of a flat tensor over a group, fp32 of the same size."""
        ranks, wire = dist.get_world_size(group), self.wire
        elements = part_elements(wire, flat.numel(), ranks)
        x_PE = torch.zeros(ranks * elements, device=flat.device)
        x_PE[: flat.numel()] = flat
        x_PE = x_PE.view(ranks, elements)
        here, owned = self._left_out(x_PE)
        sent = self._encoded(x_PE, here)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        mine = decode(wire, received, elements).sum(0, keepdim=True)
        part = self._encoded(mine, owned)
        everyone = part.new_empty(ranks * part.shape[1])
        dist.all_gather_into_tensor(everyone, part.view(-1), group=group)
        self._turn += 1
        return decode(wire, everyone.view(ranks, -1), elements).view(-1)[: flat.numel()]

    def _left_out(self, x_PE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.wire not in FEEDS_BACK:
            return None, None
        key = self._turn, x_PE.numel()
        if key not in self.left_out:
            self.left_out[key] = torch.zeros_like(x_PE), torch.zeros_like(x_PE[:1])
        return self.left_out[key]

    def _encoded(self, x_PE: Tensor, left_out: Tensor | None) -> Tensor:
        if left_out is None:
            return encode(self.wire, x_PE)
        x_PE += left_out
        sent = encode(self.wire, x_PE)
        torch.sub(x_PE, decode(self.wire, sent, x_PE.shape[1]), out=left_out)
        left_out.nan_to_num_(0.0, 0.0, 0.0)  # a step that overflows must not spoil all later ones
        return sent


def sum_messages(wire: str, elements: int, ranks: int) -> tuple[int, int]:
    """Bytes (nccl-tests' S) of the all-to-all, and of the all-gather, of a sum."""
    size = ranks * part_bytes(wire, part_elements(wire, elements, ranks))
    return size, size


def describe_wire(wire: str) -> str:
    """A line for the run's beginning."""
    kept = "; what that leaves out is added to the next step's, and begins at zero now" if wire in FEEDS_BACK else ""
    return f"gradients travel between data parallel ranks as {wire}, and are summed in fp32{kept}"
