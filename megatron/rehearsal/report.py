"""Report of a rehearsal: bytes by purpose, FLOPs and messages of a step, and its time on a CPU.

If the device also runs Python, the number of operations and messages determines the time of small steps. Formulas of
FLOPs and bytes explain a tenth of a step in small models. A rehearsal counts both exactly. `bench/plan/machine.py`
measures the cost of each, by runs whose counts differ."""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from megatron.config import Config
from megatron.config.arithmetic.pipeline_costs import bubble_factor
from megatron.config.arithmetic.pipelines import GATHER, REDUCE, table_of, with_zero
from megatron.config.problems import counted
from megatron.config.variants import used_kinds
from megatron.engine.deepspeed.options import accumulation_steps, reduces_once, zero_stage
from megatron.model.costs.describe import totals
from megatron.model.costs.exchanges import MOST
from megatron.model.costs.traffic import NotPredicted
from megatron.model.partition import rank_of
from megatron.parallel.layout.layout import Coordinates, Layout
from megatron.parallel.messages.traffic import Tally
from megatron.plan.devices import Device
from megatron.plan.memory import FRAGMENTS, RUNTIME
from megatron.plan.messages.predict import predict
from megatron.plan.prediction import choice_of, planned_memory
from megatron.plan.shapes import Shapes
from megatron.report.communication import by_group, readable_bytes, step_table, table

from .rank import RankCounts
from .storage_counter import BUCKETS, BUFFERS, GATHERED, GRADIENTS, MASTERS, MOMENTS, WEIGHTS, Allocation


@dataclass(frozen=True)
class StagePart:
    """Layers of a pipeline rank."""

    rank: int  # from 0
    blocks: tuple[int, ...]
    embedding: bool  # embedding, head: whether the rank has them
    head: bool

    def __str__(self) -> str:
        held = ["embedding"] if self.embedding else []
        for _, run in groupby(enumerate(self.blocks), key=lambda pair: pair[1] - pair[0]):
            first, *others = (block for _, block in run)
            held.append(f"blocks {first}-{others[-1]}" if others else f"block {first}")
        return ", ".join([*held, *(["head"] if self.head else [])])


def parts(config: Config) -> list[StagePart]:
    """The layers of all ranks of the pipeline, in order."""
    first, *at, last = rank_of(config)
    return [
        StagePart(rank, tuple(block for block, here in enumerate(at) if here == rank), rank == first, rank == last)
        for rank in range(config.parallel.pipeline)
    ]


def hands_states_on(config: Config) -> bool:
    """Whether ranks continue from states whose form only the previous rank knows (`model/relay.py`). Then only ranks
    that begin their sequences can be rehearsed."""
    return any(kind.context == "states" for _, kind, _ in used_kinds(config.model))


def kinds_of_ranks(config: Config, layout: Layout) -> list[int]:
    """One rank of each kind: the first of all pipeline ranks with the same layers, which keeps most micro-batches, and
    the last one. Ranks of the tensor and data axes do the same work, and the first has the largest shares. Of ranks
    that share sequences the first two, one from the middle and the last are chosen, since they exchange different
    tensors."""
    found: dict[tuple, int] = {}
    for part in parts(config):
        layers = tuple(str(config.model.blocks[block]) for block in part.blocks)
        found.setdefault((layers, part.embedding, part.head), part.rank)
    ranks = layout.context
    places = {0} if hands_states_on(config) else {0, 1 % ranks, ranks // 2, ranks - 1}
    return [
        layout.rank(Coordinates(pipeline=stage, context=context))
        for stage in sorted(found.values())
        for context in sorted(places)
    ]


KEPT = (WEIGHTS, GRADIENTS, MASTERS, MOMENTS, BUCKETS, GATHERED, BUFFERS)


def memory(allocations: Sequence[Allocation]) -> dict[str, int]:
    """Bytes by purpose. The parts that an engine keeps come first."""
    found: dict[str, int] = {}
    for each in allocations:
        part = each.part or _made(each)
        found[part] = found.get(part, 0) + each.size
    order = {part: place for place, part in enumerate(KEPT)}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], len(order)), -item[1])))


def by_layer(allocations: Sequence[Allocation]) -> dict[str, int]:
    """Bytes of the activations that are kept for the backward pass, by layer."""
    found: dict[str, int] = {}
    for each in allocations:
        if each.place.phase == "forward" and each.place.layer and not each.part:
            found[each.place.layer] = found.get(each.place.layer, 0) + each.size
    return found


def _made(allocation: Allocation) -> str:
    """Purpose of a tensor, by the place where it was made."""
    phase, layer = allocation.place.phase, allocation.place.layer
    kind = layer.split(".")[2] if layer.count(".") >= 2 else "norms and stream" if "." in layer else layer
    kind = "logits and loss" if kind == "head" else kind
    if phase == "forward":
        return f"activations: {kind or 'between layers and stages'}"
    if phase == "recompute":
        return f"recomputed activations: {kind}"
    if phase == "backward":
        return f"gradients of activations: {kind or 'between layers and stages'}"
    return "temporaries of the update" if phase == "update" else "inputs and engine"


def messages(config: Config, layout: Layout, rank: int, seen: RankCounts) -> tuple[Tally, str]:
    """Messages of a whole step, and their source."""
    with suppress(NotPredicted):
        found = predict(config, layout.world_size, rank)
        if not found.calls(MOST):  # a rehearsal's rows are shared evenly
            return found.step, "formulas"
    counted = Tally.of_rows(seen.messages)
    full = accumulation_steps(config, layout)
    if full == seen.micro_batches:
        return counted, "counted"
    each = zero_stage(config, layout) >= 2  # gradients are reduced in every micro-batch
    placed = [placed_times(config, layout, rank, number) for number in (full, seen.micro_batches)]
    scaled = Tally()
    for call, count, size in counted:
        passes = call.phase in ("forward", "backward", "recompute")
        repeated = passes and (call.layer != "" or each or call.operation in SENDS)
        times, of = (full if repeated else seen.micro_batches), seen.micro_batches
        if passes and not call.layer and call.operation in placed[0]:
            times, of = (every[call.operation] for every in placed)
        scaled.add(call, count * times // of, size * times // of)
    return scaled, f"counted over {seen.micro_batches} of {full} micro-batches"


def placed_times(config: Config, layout: Layout, rank: int, micro_batches: int) -> dict[str, int]:
    """How often the schedule of a pipeline has a rank reduce and gather at ZeRO 2 and 3."""
    if layout.pipeline == 1 or config.zero.stage < 2:
        return {}
    own = table_of(config.parallel, micro_batches)[layout.coordinates(rank).pipeline]
    kinds = [it.kind for it in with_zero(own, config.zero.stage, not reduces_once(config, layout))]
    return {"all_gather": kinds.count(GATHER), "reduce_scatter": kinds.count(REDUCE)}


def describe_rank(config: Config, layout: Layout, rank: int, seen: RankCounts, device: Device | None) -> dict[str, Any]:
    """Report on one rank, for JSON."""
    at, full = layout.coordinates(rank), accumulation_steps(config, layout)
    by_part = memory(seen.allocations)
    host = {part: by_part.pop(part) for part in offloaded(config) if part in by_part}
    tensors = sum(by_part.values())
    accelerator = device is not None and device.name != "cpu"
    allowance = round(RUNTIME + FRAGMENTS * tensors) if accelerator else 0
    flops: dict[str, float] = {}
    for place, done in seen.flops.items():
        flops[place.phase] = flops.get(place.phase, 0) + done * (
            1 if place.phase == "update" else full / seen.micro_batches
        )
    sent, source = messages(config, layout, rank, seen)
    return {
        "rank": rank,
        "at": {axis: getattr(at, axis) for axis in ("pipeline", "data", "context", "tensor")},
        "layers": str(parts(config)[at.pipeline]),
        "memory": {
            "parts": by_part,
            "activations": by_layer(seen.allocations),
            "tensors": tensors,
            "allowance": allowance,
            "total": tensors + allowance,
            "device": None if device is None else round(device.bytes),
            "fits": None if device is None else tensors + allowance <= device.bytes,
            "moment": {"phase": seen.at.place.phase, "layer": seen.at.place.layer, "operation": seen.at.operation},
            "between_steps": seen.kept - sum(host.values()),
            "while_building": seen.start,
        },
        "host_memory": {"process": seen.host, "offloaded": host},
        "flops": {"micro_batches": full, **flops},
        "operations": round(seen.whole(full)[0]),
        "communication": {"source": source, "calls": sent.rows(), "groups": by_group(sent)},
        "checkpoint": seen.checkpoint,
        "checkpoint_fragments": seen.fragments,
        "process_groups": {"joined": len(seen.groups), "largest": max(seen.groups, default=1)},
    }


def offloaded(config: Config) -> tuple[str, ...]:
    """The parts that are in the host's memory, or on its disks."""
    zero = config.zero
    found = (MASTERS, MOMENTS) if zero.offload_optimizer.device != "none" else ()
    return (*found, WEIGHTS) if zero.offload_parameters.device != "none" else found


def document(
    config: Config, layout: Layout, seen: dict[int, RankCounts], device: Device | None, seconds: float
) -> dict[str, Any]:
    """The whole rehearsal, for JSON."""
    ranks = [describe_rank(config, layout, rank, each, device) for rank, each in seen.items()]
    parameters = totals(config).parameters
    first = next(iter(seen.values())).checkpoint
    each = sum(first.values()) / (first.get("master", 0) / 4) if first.get("master") else 0.0
    planned = None if device is None else planned_memory(config, layout.world_size, device)
    # Without ZeRO one rank of each group of replicas writes optimizer states.
    writers = layout.world_size // (1 if zero_stage(config, layout) else layout.replicas)
    return {
        "ranks": layout.world_size,
        "layout": layout.sizes,
        "precision": config.precision.compute,
        "planned_memory": None if planned is None else planned.to_json(),
        "device": None if device is None else device.name,
        "parameters": parameters,
        "rehearsed": ranks,
        "checkpoint_bytes": round(parameters * each),
        "checkpoint_files": layout.world_size,
        "checkpoint_fragments": round(writers * fmean(each.fragments for each in seen.values())),
        "seconds": round(seconds, 1),
        "processor_seconds": round(sum(each.processor for each in seen.values()), 1),
    }


def text(found: dict[str, Any]) -> str:
    """A rehearsal for people."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in found["layout"].items())
    kind = found["precision"]
    if not found.get("precision_given", True):
        kind += " (not in the files, where `deepy plan` proposes bf16)"
    numbers = ", ".join(str(each["rank"]) for each in found["rehearsed"])
    ranks = "ranks" if len(found["rehearsed"]) > 1 else "rank"
    lines = [
        f"{found['parameters']:,} parameters on {counted(found['ranks'], 'rank')}: {sizes}, {kind}, "
        f"rehearsed {ranks} {numbers} in {found['seconds']} s ({found['processor_seconds']} s of processor time)"
    ]
    for each in found["rehearsed"]:
        lines += ["", *_rank(each)]
    lines.append("")
    if "step_seconds" in found:
        lines.append(f"a step: about {found['step_seconds']:.3g} s, by these counts and figures of {found['figures']}")
    lines += [
        f"a checkpoint: {readable_bytes(found['checkpoint_bytes'])} in {found['checkpoint_files']} files of ranks, "
        f"and an index of about {found['checkpoint_fragments']:,} fragments"
    ]
    return "\n".join([*lines, *_verdict(found)]) + "\n"


def _verdict(found: dict[str, Any]) -> list[str]:
    """The plan's formulas for the same layout, and last whether it fits."""
    if found["device"] is None:
        return []
    most = max(found["rehearsed"], key=lambda each: each["memory"]["total"])
    total, planned, lines = most["memory"]["total"], found["planned_memory"], []
    if planned is not None:
        lines.append(
            f"the formulas of `deepy plan`: {readable_bytes(planned['total'])} on the rank that needs most, "
            f"{planned['total'] / total - 1:+.0%} from what was counted here (docs/planning.md says why they differ)"
        )
    verdict = "fits" if most["memory"]["fits"] else "does NOT fit"
    room = f"the {readable_bytes(most['memory']['device'])} of {found['device']}"
    return [*lines, f"{readable_bytes(total)} on rank {most['rank']} {verdict} into {room}"]


def _rank(each: dict[str, Any]) -> list[str]:
    memory, moment = each["memory"], each["memory"]["moment"]
    where = " of ".join(part for part in (moment["phase"], moment["layer"]) if part)
    place = ", ".join(f"{axis} {index}" for axis, index in each["at"].items() if axis != "context" or index)
    lines = [
        f"rank {each['rank']} ({place}): {each['layers']}",
        f"most memory: {readable_bytes(memory['tensors'])} of tensors, in {where} ({moment['operation']})",
    ]
    rows = [[f"  {name}", readable_bytes(n), f"{n / memory['tensors']:.1%}"] for name, n in memory["parts"].items()]
    if memory["allowance"]:
        rows.append(["  allocator, driver, communicators (allowance)", readable_bytes(memory["allowance"]), ""])
    lines.append(table(["  part", "bytes", "of tensors"], rows))
    flops = {name: value for name, value in each["flops"].items() if name != "micro_batches" and value}
    lines.append(
        f"a step of {each['flops']['micro_batches']} micro-batches: "
        + ", ".join(f"{name} {value / 1e12:.4g}" for name, value in flops.items())
        + f" TFLOP; {each['operations']:,} operations"
    )
    host = each["host_memory"]
    extra = "".join(f", {part} {readable_bytes(size)}" for part, size in host["offloaded"].items())
    lines.append(f"on the host: process {readable_bytes(host['process'])}{extra}")
    groups = each["process_groups"]
    lines.append(
        f"writes {readable_bytes(sum(each['checkpoint'].values()))} of a checkpoint in "
        f"{each['checkpoint_fragments']:,} fragments, "
        f"is in {groups['joined']} process groups, the largest of {groups['largest']} ranks"
    )
    calls = Tally.of_rows(each["communication"]["calls"])
    if len(calls):
        lines += [f"a step's messages ({each['communication']['source']}):", step_table(calls)]
    return lines


SENDS = ("send", "recv")


@dataclass(frozen=True)
class HostWork:
    """Work of a rank in a step."""

    operations: float  # of torch
    collectives: float  # collectives, sends: calls of collectives, and sends and receives of pairs
    sends: float
    gathers: float  # parameter tensors that ZeRO 3 gathers
    flops: float  # of all matrix products

    def seconds(self, device: Device, compute: str) -> float:
        """Raises ValueError if the device has no figures of its host."""
        if device.host is None:
            raise ValueError(f"{device.name}: there are no figures of the host")
        host, rate = device.host, device.peak(compute) * device.efficiency.matrix
        figures = (host.operation, host.collective, host.send, host.gather, host.step)
        return 1e-6 * sum(count * figure for count, figure in zip(self.counts, figures)) + self.flops / rate

    @property
    def counts(self) -> tuple[float, ...]:
        """Counts in the order of `HostTime`'s figures."""
        return self.operations, self.collectives, self.sends, self.gathers, 1.0


def works(config: Config, ranks: int, seen: Mapping[int, RankCounts]) -> list[HostWork]:
    """Work of a whole step for each stage: of the rehearsed rank with most, for which others of its sequence wait."""
    layout, found = Layout.of(config, ranks), dict[int, HostWork]()
    for rank, counts in seen.items():
        work, stage = _work(config, layout, rank, counts), layout.coordinates(rank).pipeline
        found[stage] = max(work, found.get(stage, work), key=lambda each: each.operations)
    return list(found.values())


def _work(config: Config, layout: Layout, rank: int, counts: RankCounts) -> HostWork:
    full = accumulation_steps(config, layout)
    operations, flops = counts.whole(full)
    sent, _ = messages(config, layout, rank, counts)
    sends = sum(number for call, number, _ in sent if call.operation in SENDS)
    return HostWork(
        operations, sum(number for _, number, _ in sent) - sends, sends, full * _gathered(config, layout), flops
    )


def _gathered(config: Config, layout: Layout) -> float:
    """Tensors that ZeRO 3 gathers for a forward and a backward pass together, in each chunk of a sequence, and 1.5
    times that with full recomputation. Small ones that stay gathered (`zero.persistent_size`) count too."""
    if config.zero.stage != 3:
        return 0.0
    shapes, choice = Shapes(config, layout.world_size), choice_of(config)
    tensors = sum(shapes.layer(place, choice).tensors for place in range(shapes.places))
    again = 1.5 if config.training.activation_checkpointing.mode == "full" else 1.0
    return tensors * again * (config.training.sequence_chunks or 1)


def whole(config: Config, ranks: int, found: Sequence[HostWork]) -> HostWork:
    """Work that determines the time of a step: that of the slowest rehearsed rank, and of a micro-batch of the other
    stages while the pipeline fills."""
    layout = Layout.of(config, ranks)
    *others, slowest = sorted(found, key=lambda work: work.operations)
    count = accumulation_steps(config, layout)
    share = (layout.pipeline - 1) * bubble_factor(config.parallel, count) / count
    filling = [share * statistics.fmean(counts) for counts in zip(*map(astuple, others or [slowest]))]
    return HostWork(*(own + more for own, more in zip(astuple(slowest), filling)))


def step_seconds(config: Config, ranks: int, found: Sequence[HostWork], device: Device) -> float:
    """Seconds of a step, by the work of the rehearsed ranks.

    Raises:
        ValueError: the device has no figures of its host.
    """
    return whole(config, ranks, found).seconds(device, config.precision.compute)
