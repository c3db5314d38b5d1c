"""The time of a step in closed form: products in tiles and waves, memory traffic, messages, pipeline, optimizer.

Each operation takes the longer of its arithmetic and its memory traffic. Sums over tensor parallel ranks and sends
between stages do not overlap. Gradients of ZeRO 1 and 2 are reduce-scattered under the backward pass, at ZeRO 2 in
every micro-batch. Where DeepSpeed 0.19.8 reduces, its bf16 optimizer does so after the last backward pass. ZeRO 3
gathers ahead of use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2
from operator import add
from typing import Any, NamedTuple

from megatron.config import Config
from megatron.config.arithmetic.pipeline_costs import Costs, bubble_factor
from megatron.config.arithmetic.pipelines import GATHER, is_split, table_of, with_zero
from megatron.config.arithmetic.wire import between_stages, bucket_elements, scatters_gradients
from megatron.parallel.layout.layout import Layout
from megatron.parallel.messages.curve import choose_curve
from megatron.parallel.messages.traffic import SIZES
from megatron.parallel.transport.compression import sum_messages

from .candidate import Candidate, layout_of, on_device
from .devices import Cluster, Device, known_devices
from .sequence import exchanges, rows_around
from .shapes import Matrix, RankLayer, RankWeights, Shapes


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, as a host sees them."""

    ranks: int  # of the group
    local: int  # ranks of the group on each host

    @property
    def hosts(self) -> int:
        return ceil(self.ranks / self.local)


def group(size: int, stride: int, per_host: int) -> Group:
    """A group of `size` ranks that are `stride` apart, ranks being numbered host by host."""
    return Group(size, max(1, min(size, per_host // stride if stride < per_host else 1)))


def groups(layout: Layout, per_host: int) -> dict[str, Group]:
    """The groups of a layout by axis."""
    tensor, replicas = layout.tensor, layout.replicas
    stride = 1 if layout.folded else tensor
    return {
        "tensor": group(tensor, 1, per_host),
        "columns": group(layout.columns, 1, per_host),
        "rows": group(tensor // layout.columns, layout.columns, per_host),
        "context": group(layout.context, tensor, per_host),
        "replicas": group(replicas, tensor, per_host),
        "expert": group(layout.expert, stride, per_host),
        "expert_data": group(layout.expert_data, stride * layout.expert, per_host),
        "pipeline": group(layout.pipeline, tensor * replicas, per_host),
    }


def ring(operation: str, ranks: int, size: float, latency: float, bandwidth: float) -> float:
    """Seconds of one collective among ranks with equal links (Thakur et al. 2005, nccl-tests' PERFORMANCE.md).

    A ring of n ranks takes 2 (n - 1) steps of S / n bytes for an all-reduce of S. An all-gather, a reduce-scatter or an
    all-to-all takes n - 1 steps. Small all-reduces use a tree.

    Args:
        operation: as in `megatron.parallel.messages.traffic.Call`.
        size: bytes of the whole tensor, or of a send's message.
        latency: seconds of each step.
        bandwidth: bytes per second of a rank, in one direction.
    """
    if ranks == 1:
        return 0.0
    if operation == "all_reduce":
        around = 2 * (ranks - 1) * (latency + size / (ranks * bandwidth))
        return min(around, 2 * ceil(log2(ranks)) * latency + 2 * size / bandwidth)
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) * (latency + size / (ranks * bandwidth))
    return latency + size / bandwidth  # a send, or a broadcast along a chain of pieces


def collective(at: Cluster, group: Group, operation: str, size: float, messages: float = 1) -> float:
    """Seconds of `messages` equal collectives of `size` bytes in total, one after the other.

    If a group spans hosts, the slowest link of the ring is the network. The rings that leave a host at the same time,
    one for each of its groups, share its adapters. A measured curve for the same ranks and hosts replaces the formulas.
    """
    if group.ranks == 1 or not messages:
        return 0.0
    curve = choose_curve(at.curves, operation, group.ranks, group.hosts)
    if curve is not None:
        return messages * curve.seconds(size / messages)
    link, network = at.device.link, at.network
    inside = ring(operation, group.ranks, size / messages, link.latency * 1e-6, link.bandwidth * 1e9)
    if group.hosts == 1:
        return messages * inside
    host = network.bandwidth * 1e9 * network.adapters
    between = min(host * group.local / at.per_host, link.bandwidth * 1e9)
    # A host has one hop less than ranks. Hops between hosts are slower and fewer.
    hops = (link.latency * (group.ranks - group.hosts) + network.latency * group.hosts) / group.ranks
    return messages * ring(operation, group.ranks, size / messages, hops * 1e-6, between)


# Tiles of a matrix product, and the share of the best tile's rate that each reaches once all units have one.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.55))
# Share of its rate that a product reaches, by the largest power of two that divides its inner and row sizes. With 64
# (128 bytes) every access fills the tensor cores (Anthony et al. 2024). The others are estimates from its figures.
ALIGNED = ((64, 1.0), (32, 0.95), (16, 0.9), (8, 0.85), (4, 0.65), (2, 0.5), (1, 0.35))
BACKWARD_ATTENTION = 2.5  # times the forward pass: scores are made again (Dao 2023)
OVERLAP = 0.8  # share of the computation with which communication overlaps
OPTIMIZER_BYTES = 30  # per parameter: reads weight, gradient and moments, writes weight, moments and a 16-bit copy
KERNELS = 12  # of a layer's forward pass, in addition to its products
SINGLY = 2.0  # memory traffic over that of a compiled layer, by a Llama block's operations. Not measured on a GPU
# Work of DeepSpeed's Python for each tensor of parameters, in launches: of a step and of a micro-batch. In the latter
# ZeRO 3 gathers, releases and reduces every tensor. Measured with the models of bench/plan/plan_choice.py, in processor
# time. It takes a CPU's time. On a GPU it runs next to the kernels, and counts if it takes longer (`_host`).
HOOKS = {0: (0, 0), 1: (6, 0), 2: (0, 5), 3: (0, 50)}


@lru_cache(maxsize=200_000)
def product_rate(m: float, n: int, k: int, count: int, units: int) -> float:
    """The share of a device's best rate that `count` products of m x k with k x n reach."""
    align = next(share for size, share in ALIGNED if n % size == 0 and k % size == 0)
    if units == 1:
        return 1.0
    best = 0.0
    for rows, columns, share in TILES:
        tiles = ceil(m / rows) * ceil(n / columns) * count
        waves = ceil(tiles / units)
        best = max(best, share * m * n * count / (waves * units * rows * columns))
    return align * best


def product_time(device: Device, peak: float, size: int, m: float, n: int, k: int, count: int = 1) -> float:
    """Seconds of `count` equal products in parallel."""
    if m <= 0:
        return 0.0
    rate = product_rate(m, n, k, count, device.units) * device.efficiency.matrix * peak
    moved = count * size * (m * k + k * n + m * n) / (device.bandwidth * 1e9 * device.efficiency.memory)
    return max(2 * m * n * k * count / rate, moved) + device.launch * 1e-6


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch on a rank, by what it is spent on."""

    matrix: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0

    def __add__(self, other: MicroBatchTime) -> MicroBatchTime:
        return MicroBatchTime(*map(add, vars(self).values(), vars(other).values()))

    def times(self, factor: float) -> MicroBatchTime:
        return self if factor == 1 else MicroBatchTime(*(factor * each for each in vars(self).values()))

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def computing(self) -> float:
        return self.matrix + self.attention + self.memory + self.recompute


@dataclass(frozen=True)
class StepTime:
    """The time of a step.

    Attributes:
        bubble: the share of it that a pipeline's stages wait, on average.
    """

    seconds: float  # of the whole step
    parts: dict[str, float]  # seconds by purpose, which sum to `seconds`
    stages: tuple[float, ...]  # seconds of a micro-batch on each rank of the pipeline

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "parts": self.parts, "stages": list(self.stages)}


def _costs(work: MicroBatchTime, send: float, weights: float) -> Costs:
    """The parts of a rank's passes. A product takes as long as that of its inputs' gradients."""
    shared = work.tensor + work.expert + work.context + send
    attention = work.attention / (1 + BACKWARD_ATTENTION)
    forward = (work.matrix + work.memory) / 3 + attention + shared / 2
    return Costs(forward, work.total + send - forward - weights, weights)


class _Schedule(NamedTuple):
    pipeline: int
    stages_per_rank: int
    schedule: str


@lru_cache(maxsize=1024)
def _gathers(key: tuple[int, int, str], micro_batches: int, each: bool) -> float:
    """How often the first rank of a pipeline gathers all its weights in a step at ZeRO 3."""
    parallel = _Schedule(*key)
    own = with_zero(table_of(parallel, micro_batches)[0], 3, each)
    return sum(it.kind == GATHER for it in own) / parallel.stages_per_rank


class StepEstimator:
    """Times candidates of one configuration on one machine.

    Args:
        config: resolved, for any layout.
    """

    def __init__(self, config: Config, shapes: Shapes, at: Cluster) -> None:
        self.shapes, self.at, self.device = shapes, at, at.device
        self.compute = config.precision.compute
        self.size, self.peak = SIZES[self.compute], at.device.peak(self.compute)
        self._work: dict[tuple, MicroBatchTime] = {}
        self._of_teacher: StepEstimator | None = None

    def step(self, config: Config, choice: Candidate) -> StepTime:
        """The time of one step of a candidate. `config` has its values (`candidate.apply`)."""
        layout, held = layout_of(choice, self.shapes.ranks), self.shapes.held(config)
        at, count = groups(layout, self.at.per_host), config.training.accumulation or 1
        works = [self._stage(config, choice, places, at) for places in held]
        works[-1] += self._teacher(config, choice, at)
        if choice.pipeline > 1 and self.device.name != "cpu" and is_split(config.parallel, count):
            works = [replace(each, memory=SINGLY * each.memory) for each in works]
        send = choice.stages_per_rank * self._send(config, choice, at)
        totals = [each.total + send for each in works]
        slowest = max(range(len(works)), key=totals.__getitem__)
        running, bubble = count * totals[slowest], 0.0
        if choice.pipeline > 1:
            blocks = [place for place in held[slowest] if 0 < place < self.shapes.places - 1]
            later = self._stage(config, choice, blocks, at).matrix / 3
            factor = bubble_factor(config.parallel, count, _costs(works[slowest], send, later))
            bubble = (sum(totals) - totals[slowest]) * factor
        weights = self.shapes.weights(choice, held[slowest])
        data = self._data(config, layout, weights, works[slowest], at, count)
        update = self._update(config, layout, weights)
        parts = {name: count * seconds for name, seconds in vars(works[slowest]).items()}
        parts |= {"pipeline": count * send, "bubble": bubble, "data": data, "accumulate": 0.0, "optimizer": update}
        parts["accumulate"] = count * self._accumulate(config, layout, weights)
        parts["hooks"] = self._hooks(choice, held[slowest], layout, count)
        seconds = running + bubble + data + update + parts["accumulate"] + parts["hooks"]
        parts["host"] = self._host(choice, count, seconds)
        seconds += parts["host"]
        return StepTime(seconds, parts, tuple(totals))

    def _stage(self, config: Config, choice: Candidate, places: Sequence[int], at: dict[str, Group]) -> MicroBatchTime:
        alike = (*choice.cuts, choice.context, choice.micro_batch, choice.pipeline > 1)  # as far as layers go
        stage = (tuple(places), choice.recompute, alike)
        if stage in self._work:
            return self._work[stage]
        total = MicroBatchTime()
        for place in places:
            key = (self.shapes.classes[place], self.shapes.recomputes(config, choice, place), alike)
            if key not in self._work:
                self._work[key] = self._layer(config, choice, place, at)
            passes = self.shapes.passes(place)  # the forward pass is a third of a layer's work
            total += self._work[key].times(passes.backward + passes.without / 3)
        self._work[stage] = total
        return total

    def _teacher(self, config: Config, choice: Candidate, at: dict[str, Group]) -> MicroBatchTime:
        shapes = self.shapes.teacher
        if shapes is None:
            return MicroBatchTime()
        if self._of_teacher is None:
            self._of_teacher = StepEstimator(shapes.config, shapes, self.at)
        own = config.model_copy(update={"model": shapes.config.model})
        whole = self._of_teacher._stage(own, replace(choice, recompute="none"), range(shapes.places), at)
        return whole.times(1 / 3)  # of a layer's work

    def _layer(self, config: Config, choice: Candidate, place: int, at: dict[str, Group]) -> MicroBatchTime:
        layer, mode = self.shapes.layer(place, choice), self.shapes.recomputes(config, choice, place)
        kept = config.model.recurrence.backward if self.shapes.recurs[place] else 1
        tokens = choice.micro_batch * config.training.sequence_length / choice.context
        products = [self._product(tokens, each) for each in layer.matrices]
        forward, backward = (sum(each) for each in zip(*products)) if products else (0.0, 0.0)
        factor = 0.5 if layer.attends else 1.0  # causal kernels skip what is masked
        attention = factor * tokens * layer.other / (self.peak * self.device.efficiency.attention)
        moved = self._moved(layer, tokens, kept)
        again = 0.0
        if 0 < place < self.shapes.places - 1:
            full = forward + attention + moved
            again = {"none": 0.0, "selective": moved, "full": full}[mode]
        tensor = sum(
            collective(self.at, at[call.group], call.operation, size, messages)
            for call, messages, size in self.shapes.sends(place, choice, on_device(config, self.device.name != "cpu"))
        )
        passes = 4 if mode == "none" else 6
        if choice.depth > 1 and layer.rows:
            whole, number = choice.depth * layer.rows, len(layer.matrices)
            gather = collective(self.at, at["expert"], "all_gather", whole * self.size, number)
            scatter = collective(self.at, at["expert"], "reduce_scatter", whole * max(4, self.size), number)
            overlap = 0.0 if self.device.name == "cpu" else OVERLAP  # of messages and products
            first = gather / number  # of the block, which no product precedes
            ahead = first + max(0.0, gather - first - overlap * forward)
            tensor += ahead + {"none": 0.0, "selective": gather, "full": ahead}[mode]
            tensor += max(0.0, gather + scatter - overlap * backward)
        expert = 0.0
        if choice.expert > 1:
            expert = passes * collective(self.at, at["expert"], "all_to_all", tokens * layer.expert_rows)
        context = self._context(config, choice, place, at["context"], layer.state, attention)
        context += self._rows(config, choice, place, at["context"], layer.rows, forward + backward)
        return MicroBatchTime(
            forward + backward, attention * (1 + BACKWARD_ATTENTION), 3 * moved, again, tensor, expert, context
        )

    def _context(
        self, config: Config, choice: Candidate, place: int, group: Group, state: float, attention: float
    ) -> float:
        """Messages of ranks that share a sequence. A ring sends keys while attention is computed with others."""
        blocks = config.model.blocks
        mixers = blocks[place - 1].mixers if 0 < place < self.shapes.places - 1 else ()
        exposed, hidden = 0.0, 0.0
        for each in (sent for mixer in mixers for sent in exchanges(config, mixer, choice, state)):
            members = Group(each.ranks, min(each.ranks, group.local))
            if each.operation == "send":  # the slowest hop holds up the ring
                members = Group(2, 2 if group.hosts == 1 else 1)
            seconds = collective(self.at, members, each.operation, each.size, each.messages)
            exposed, hidden = (exposed, hidden + seconds) if each.hidden else (exposed + seconds, hidden)
        return exposed + max(0.0, hidden - OVERLAP * attention * (1 + BACKWARD_ATTENTION))

    def _rows(self, config: Config, choice: Candidate, place: int, group: Group, rows: int, computing: float) -> float:
        """Rows of matrices that are sent while products with others are computed."""
        head, chunks = place == self.shapes.places - 1, config.training.sequence_chunks
        repeated = 0 < place and not head and (choice.recompute == "full" or chunks > 1)
        members = Group(2, 2 if group.hosts == 1 else 1)
        sent = rows_around(config, choice, rows, repeated)
        seconds = sum(collective(self.at, members, each.operation, each.size, each.messages) for each in sent)
        seconds *= 1 if head else chunks  # the head's are gathered once
        return max(0.0, seconds - OVERLAP * computing)

    def _product(self, tokens: float, each: Matrix) -> tuple[float, float]:
        """Seconds of the product, and of the gradients of what it read and of itself."""
        m, n, k = tokens * each.share, each.rows, each.columns
        mine = (self.device, self.peak, self.size)
        back = product_time(*mine, m, k, n, each.count) + product_time(*mine, n, k, max(1, round(m)), each.count)
        return product_time(*mine, m, n, k, each.count), back

    def _moved(self, layer: RankLayer, tokens: float, kept: int) -> float:
        """Memory traffic of a layer's forward pass in addition to its products. It keeps activations of `kept`
        passes."""
        rate = self.device.bandwidth * 1e9 * self.device.efficiency.memory
        return 2 * tokens * layer.saved["none"] / kept / rate + KERNELS * self.device.launch * 1e-6

    def _send(self, config: Config, choice: Candidate, at: dict[str, Group]) -> float:
        """A micro-batch's activations and their gradients between neighbouring stages."""
        if choice.pipeline == 1:
            return 0.0
        tokens = choice.micro_batch * config.training.sequence_length / choice.context
        hidden = config.model.hidden_size
        cut = choice.columns * (choice.tensor if choice.sequence else 1)
        stream = "fp32" if config.model.residual.fp32 else self.compute
        wire = config.parallel.communication.compress.pipeline
        dtype, elements = between_stages(wire, round(tokens * hidden / cut), hidden, stream)
        pair = Group(2, min(2, at["pipeline"].local))
        return 2 * collective(self.at, pair, "send", elements * SIZES[dtype])

    def _data(
        self, config: Config, layout: Layout, weights: RankWeights, work: MicroBatchTime, at: dict[str, Group], n: int
    ) -> float:
        """Sums of gradients and gathered weights that no computation hides."""
        mixed = self.compute != "fp32"
        reduced = SIZES[config.precision.reduce] if mixed else 4
        scattered, wire = scatters_gradients(config, layout), config.parallel.communication.compress.data
        bucket = bucket_elements(config, layout.replicas) if scattered else config.zero.bucket_size

        def sums(operation: str, size: float) -> float:
            pairs = (("replicas", weights.dense), ("expert_data", weights.expert))
            return sum(
                collective(self.at, at[axis], operation, number * size, ceil(number / bucket)) for axis, number in pairs
            )

        def exchanged() -> float:
            """Sums in another form: to the owners of parts, and from them to all."""
            seconds = 0.0
            for axis, number in (("replicas", weights.dense), ("expert_data", weights.expert)):
                messages = zip(("all_to_all", "all_gather"), sum_messages(wire, number, at[axis].ranks))
                seconds += sum(collective(self.at, at[axis], *each, ceil(number / bucket)) for each in messages)
            return seconds

        gather, times = sums("all_gather", self.size), 1 if config.zero.reduce == "step" else n
        if layout.zero_stage == 3 and layout.pipeline > 1:
            parallel = config.parallel
            share = _gathers((parallel.pipeline, parallel.stages_per_rank, parallel.schedule), n, times > 1)
            return share * gather + times * sums("reduce_scatter", reduced)
        if layout.zero_stage == 3:
            hidden = OVERLAP * work.computing if config.zero.overlap else 0.0
            return max(0.0, n * 2 * gather + times * sums("reduce_scatter", reduced) - n * hidden)
        if scattered:
            under = 0.0 if self.device.name == "cpu" else OVERLAP * 2 / 3 * work.computing
            passes = times if layout.zero_stage == 2 else 1
            return passes * max(0.0, sums("reduce_scatter", reduced) - under) + gather
        reduce = sums("all_reduce", reduced) if wire == "none" else exchanged()
        plain = layout.pipeline == 1 and config.zero.overlap and layout.zero_stage > 0
        hidden = OVERLAP * 2 / 3 * work.computing
        if layout.zero_stage == 2:
            return times * max(0.0, reduce - (hidden if plain and times == n else 0.0)) + gather
        late = mixed and config.precision.accumulate == "fp32"  # DeepSpeed's bf16 optimizer
        reduce = max(0.0, reduce - hidden) if plain and not late else reduce
        return reduce + (gather if layout.zero_stage else 0.0)

    def _accumulate(self, config: Config, layout: Layout, weights: RankWeights) -> float:
        """A micro-batch's gradients added to the sums."""
        if self.compute == "fp32" or layout.zero_stage > 1:
            return 0.0
        size = self.size + 2 * SIZES[config.precision.accumulate]
        return weights.total * size / (self.device.bandwidth * 1e9 * self.device.efficiency.memory)

    def _hooks(self, choice: Candidate, places: Sequence[int], layout: Layout, count: int) -> float:
        """DeepSpeed's work for each tensor of parameters, if it takes the device's time."""
        if self.device.name != "cpu":
            return 0.0
        once, each = HOOKS[layout.zero_stage if layout.replicas > 1 or layout.zero_stage == 3 else 0]
        tensors = sum(self.shapes.layer(place, choice).tensors for place in places)
        return tensors * (once + count * each) * self.device.launch * 1e-6

    def _host(self, choice: Candidate, count: int, seconds: float) -> float:
        """Time that a GPU waits at ZeRO 3 for DeepSpeed's Python, which works on each tensor in each micro-batch next
        to the kernels. It was measured only on the CPU of `devices.yml`."""
        known = known_devices()[0]["cpu"].host
        if choice.zero != 3 or known is None or self.device.name == "cpu":
            return 0.0
        tensors = sum(self.shapes.layer(place, choice).tensors for place in range(self.shapes.places))
        return max(0.0, 1e-6 * known.gather * tensors * count - seconds)

    def _update(self, config: Config, layout: Layout, weights: RankWeights) -> float:
        owned = weights.dense / layout.replicas + weights.expert / layout.expert_data
        owned = owned if layout.zero_stage else float(weights.total)
        return owned * OPTIMIZER_BYTES / (self.device.bandwidth * 1e9 * self.device.efficiency.memory)
