"""Messages of ZeRO 2 and 3 between the replicas of pipeline stages (`engine/deepspeed/placed.py`)."""

from bisect import bisect
from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron.config import Config
from megatron.config.arithmetic.pipelines import REDUCE, gathers, table_of, with_zero
from megatron.config.arithmetic.recurrence import core_of
from megatron.model.costs.traffic import NotPredicted
from megatron.model.partition import copies, stage_bounds, stages_of_parameters
from megatron.parallel.layers.parameters import is_spread, logical_of
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.layout.precision import type_name

from ...engine.deepspeed.buckets import in_buckets
from ...engine.deepspeed.options import accumulation_steps, reduces_once
from .matrices import padded


def placed_messages(
    config: Config, mesh: Mesh, held: list[int], layers: nn.Module, groups: list[dict[str, Any]], limit: int
) -> Iterator[tuple[str, str, str, str, int, int]]:
    """(phase, group, operation, type, elements in all, messages). The table says how often a bucket is sent.

    Args:
        held: places of this rank's `layers` in the list [embedding, blocks..., head].
        groups: of the optimizer.
        limit: elements of a bucket.
    """
    if core_of(config.model.blocks):
        raise NotPredicted("there is no formula for a recurrent core at ZeRO 2 and 3 with a pipeline")
    each, rank, zero = not reduces_once(config, mesh.layout), mesh.at.pipeline, config.zero.stage
    own = with_zero(table_of(config.parallel, accumulation_steps(config, mesh.layout))[rank], zero, each)
    copied = [f"{name}." for name, ranks in copies(config).items() if rank in ranks]
    bounds, of_stages = stage_bounds(config), dict[int, list[nn.Parameter]]()
    for place, layer in zip(held, layers.children(), strict=True):
        of_stages.setdefault(bisect(bounds, place) - 1, []).extend(layer.parameters())
    users = stages_of_parameters(config, rank, of_stages)

    def bucket_of(parameter: nn.Parameter) -> tuple[tuple[int, ...], str]:
        name = logical_of(parameter).name
        return users[parameter], name if name.startswith(tuple(copied)) else ""

    for group in (made["params"] for made in in_buckets(groups, limit, bucket_of)):
        over, stages = "expert_data" if is_spread(group[0]) else "replicas", users[group[0]]
        ranks = mesh.layout.expert_data if is_spread(group[0]) else mesh.layout.replicas
        elements = padded(sum(parameter.numel() for parameter in group), ranks)
        reduced = "fp32" if config.precision.compute == "fp32" else config.precision.reduce
        times = sum(it.kind == REDUCE and it.stage in stages for it in own) if each else 1
        yield "backward", over, "reduce_scatter", reduced, times * elements, times
        gathered, once = type_name(group[0].dtype), zero == 2
        times = 1 if once else gathers(own, stages)
        yield "update" if once else "forward", over, "all_gather", gathered, times * elements, times
