"""Count the bytes that a layer of experts sends.

Tensor parallel ranks have the same tokens. Forward and backward passes count.

    OMP_NUM_THREADS=1 python -m bench expert-traffic --tensor 2 --data 2 --expert 2

Three ways of the same tokens to the same experts, on gloo processes of this machine, must give the same outputs. The
exit status is 1 where they do not.

- Every tensor parallel rank sends all its tokens to the ranks with its slices.
- Each rank sends its share, and rows that arrive are gathered, as `parallel.expert` does.
- Experts are whole, so each rank sends its share and nothing is gathered. This is `parallel.expert_tensor: 1`, with
  `tensor` times the number of expert parallel ranks.

Bytes are counted in the collectives, per token of a data parallel rank and mean over ranks. Bytes that stay on a rank
are not sent.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing

from bench.runner import Mismatch, Result, grid
from megatron.config import resolve
from megatron.kinds.moe.dispatch import AllToAllDispatch
from megatron.kinds.moe.layer import MoE
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import ALONE, Mesh

SIZES = {
    "tensor": 2, "data": 2, "expert": 2, "experts": 8, "top-k": 2, "tokens": 512, "hidden-size": 256, "width": 64
}  # fmt: skip
WAYS = ("each sends all", "each sends its share", "folded")
TOLERANCE = 1e-4  # of the outputs, relative


@dataclass
class Traffic:
    """Traffic that this rank has sent.

    Attributes:
        exchanged: bytes of rows to other ranks in all-to-alls.
        exchanges: number of these all-to-alls.
        gathered: bytes to other ranks in all-gathers and reduce-scatters, as a ring sends them.
    """

    exchanged: int = 0
    exchanges: int = 0
    gathered: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Counts what float tensors this rank sends meanwhile."""
    traffic = Traffic()
    exchange, gather, scatter = dist.all_to_all_single, dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def exchanging(
        output: torch.Tensor,
        tensor: torch.Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if sent is not None:  # rows, not their numbers
            leaving = sum(sent) - sent[dist.get_rank(group)]
            traffic.exchanged += leaving * tensor[0:0].new_empty(1, *tensor.shape[1:]).nbytes
            traffic.exchanges += 1
        exchange(output, tensor, received, sent, group)

    def gathering(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        traffic.gathered += (dist.get_world_size(group) - 1) * tensor.nbytes * tensor.is_floating_point()
        gather(output, tensor, group=group)

    def scattering(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        traffic.gathered += (dist.get_world_size(group) - 1) * output.nbytes
        scatter(output, tensor, group=group)

    patched: dict[str, Any] = {
        "all_to_all_single": exchanging,
        "all_gather_into_tensor": gathering,
        "reduce_scatter_tensor": scattering,
    }
    with mock.patch.multiple(dist, **patched):
        yield traffic


def send_everything(mesh: Mesh) -> AllToAllDispatch:
    """The way of rows on which every tensor parallel rank sends all its tokens to the ranks that have its slices."""
    return AllToAllDispatch(replace(mesh, tensor=ALONE, expert_tensor=ALONE))


def layout_of(way: str, asked: argparse.Namespace) -> Layout:
    folded = way == "folded"
    expert = asked.expert * (asked.tensor if folded else 1)
    return Layout(tensor=asked.tensor, data=asked.data, expert=expert, folded=folded)


def passed(way: str, asked: argparse.Namespace) -> tuple[Traffic, torch.Tensor, torch.Tensor]:
    """Run forward and backward on every rank: its traffic, the output and the gradient of the input."""
    mesh = Mesh.build(layout_of(way, asked))
    moe = {"experts": asked.experts, "top_k": asked.top_k, "hidden_size": asked.width, "losses": {"balance": 0.0}}
    config = resolve({
        "model": {"layers": "moe", "hidden_size": asked.hidden_size, "vocab_size": 8, "moe": moe},
        "training": {"steps": 1, "sequence_length": asked.tokens},
    })
    init = Initialisation(config.model.init, asked.hidden_size, 1)
    layer = MoE(ParameterFactory(mesh).scope("moe"), config.model, config.model.moe, init)
    if way == WAYS[0]:
        layer.exchange = send_everything(mesh)
    draw = torch.Generator().manual_seed(mesh.data.rank)
    x, weight = (torch.randn(1, asked.tokens, asked.hidden_size, generator=draw) for _ in range(2))
    x.requires_grad_()
    with counted() as traffic:
        y = layer(x, Stream(x))
        (y * weight).sum().backward()
    assert x.grad is not None
    return traffic, y.detach(), x.grad


def work(rank: int, way: str, asked: argparse.Namespace, folder: str) -> None:
    """One process: what it has to say goes into a file."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=asked.tensor * asked.data
    )
    traffic, *made = passed(way, asked)
    torch.save((vars(traffic), *made), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def on_each_rank(way: str, asked: argparse.Namespace) -> list[tuple[Traffic, torch.Tensor, torch.Tensor]]:
    """The results of `passed` on each rank."""
    ranks = asked.tensor * asked.data
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (way, asked, folder), nprocs=ranks)
        answers = [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]
    return [(Traffic(**traffic), *made) for traffic, *made in answers]


def options(parser: argparse.ArgumentParser) -> None:
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)


def measure(given: argparse.Namespace) -> Result:
    cells: list[list[Any]] = [["tokens", "all-to-all, bytes per token and rank", "over the tensor axis", "together"]]
    first: list[torch.Tensor] = []
    for way in WAYS:
        answers = on_each_rank(way, given)
        traffic, made = [answer[0] for answer in answers], [tensor for answer in answers for tensor in answer[1:]]
        first = first or made
        if any((one - other).norm() > TOLERANCE * one.norm() for one, other in zip(first, made)):
            raise Mismatch(f"{way}: other outputs than where {WAYS[0]}")
        sent = [sum(getattr(each, name) for each in traffic) / len(traffic) for name in ("exchanged", "gathered")]
        exchanged, gathered = (each / given.tokens for each in sent)
        cells.append([way, *(f"{each:,.0f}" for each in (exchanged, gathered, exchanged + gathered))])
    return Result(cells, grid(cells))
