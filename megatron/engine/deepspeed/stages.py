"""The model for DeepSpeed's pipeline engine: a list of layers that map tuples of tensors to tuples of tensors."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megatron.config.arithmetic.pipelines import ranks_of_stages
from megatron.config.arithmetic.wire import between_stages
from megatron.config.registry import load
from megatron.model.block import Block
from megatron.model.embedding_and_head import Embedding, Head, Reader
from megatron.model.multi_token import FurtherLabels
from megatron.model.norm import Norm
from megatron.model.partition import copies, stage_bounds, stages_of_parameters, users
from megatron.model.stack import ModelPlan
from megatron.model.stream import StreamForm
from megatron.parallel.layers.parameters import is_copy, logical_of
from megatron.parallel.layout.mesh import new_group
from megatron.parallel.layout.precision import COMPUTE_TYPES
from megatron.parallel.transport.compression import pack_rows, unpack_rows

from .process import groups_of_mesh

FINAL_NORM = "final_norm"  # logical name of the norm before the head, which a recurrent core uses too
HEAD = "head"  # of a class that is the whole model
EMBEDDING = "embedding"  # of a rank that has the first stage, and maybe the last one too


class EmbeddingStage(nn.Module):
    """(tokens, then the form's side channels) to a packed stream."""

    def __init__(self, plan: ModelPlan, shared: dict[str, nn.Module]):
        super().__init__()
        self.embedding, self.form = plan.embedding(), plan.form_at(0)
        shared[EMBEDDING] = self.embedding

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.form.pack(self.embedding(inputs[0], **self.form.name(inputs[1:])))


class BlockStage(nn.Module):
    """One block on packed streams."""

    def __init__(self, plan: ModelPlan, index: int, shared: dict[str, nn.Module]):
        super().__init__()
        self.block, self.before, self.after = plan.block(index, shared), plan.form_at(index), plan.form_at(index + 1)

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.after.pack(self.block(self.before.unpack(tensors)))


class CoreStage(nn.Module):
    """The blocks of a recurrent core, as one layer on packed streams."""

    def __init__(self, plan: ModelPlan, shared: dict[str, nn.Module]):
        super().__init__()
        inside = plan.inside
        self.blocks = nn.ModuleList(plan.block(index, shared) for index in inside)
        self.before, self.after = plan.form_at(inside.start), plan.form_at(inside.stop)
        self.norm = None
        if plan.config.model.recurrence.norm == "head":
            self.norm = shared.setdefault(FINAL_NORM, plan.head_norm())
        self.core = plan.core(cast(Iterable[Block], self.blocks), cast(Norm, self.norm))

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.core is not None
        return self.after.pack(self.core(self.before.unpack(tensors)))


class HeadStage(nn.Module):
    """The last layer: a packed stream to the loss.

    The loss is computed inside the module, not in DeepSpeed's `loss_fn`. Its backward pass clears bf16 gradients when
    it reaches the module's output, also gradients of later computation. Labels arrive in `targets`, which the engine
    fills in the order of the micro-batches."""

    def __init__(self, plan: ModelPlan, shared: dict[str, nn.Module]):
        super().__init__()
        tokens = None
        if plan.head_embeds and HEAD not in shared:
            own = cast("Embedding | None", shared.get(EMBEDDING))
            tokens = plan.tokens() if own is None else own.tokens.weight
        norm = cast("Norm | None", shared.get(FINAL_NORM))
        self.head = cast(Head, shared.get(HEAD)) or plan.head(tokens, norm)
        self.form = plan.form_at(len(plan.blocks))
        self.targets: deque[tuple[Tensor, Tensor, FurtherLabels | None, dict[str, Tensor]]] = deque()
        self.readers: deque[Reader] = deque()  # if any, they compute `found`, and there is no loss
        self.found: list[Any] = []
        self.observe: Callable[[Tensor, Tensor], None] = lambda ce_BS, weights_BS: None

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor:
        labels_BS, weights_BS, further, columns = self.targets.popleft()
        if self.readers:
            reader = self.readers.popleft()
            self.found.append(self.head(self.form.unpack(tensors), labels_BS, weights_BS, reader))
            return weights_BS.sum()
        loss, ce_BS = self.head(self.form.unpack(tensors), labels_BS, weights_BS, further=further, columns=columns)
        self.observe(ce_BS, weights_BS)
        return loss


class Pipeline(PipelineModule):
    """This rank's stages, by default one.

    Ranks that use the same parameters (a tied embedding, shared layers) have a copy each, with the same name and
    thus the same initial values. Gradients are summed over the copies once per step, and the norm only counts the
    first copy."""

    def __init__(self, plan: ModelPlan):
        self.plan = plan
        self.tied: list[tuple[Tensor, dist.ProcessGroup]] = []
        self._copy_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._users: dict[nn.Parameter, tuple[int, ...]] = {}
        layout = plan.mesh.layout
        self._bounds, self._layers = stage_bounds(plan.config), dict[int, list[nn.Module]]()
        self.stage = plan.mesh.pipeline.rank  # that `forward` computes
        self._homes = ranks_of_stages(plan.config.parallel)
        shared: dict[str, nn.Module] = {}
        layers = self._of_whole(shared) if plan.whole else self._of_layers(shared)
        specs = [*layers, LayerSpec(HeadStage, plan, shared)]
        topology = PipeModelDataParallelTopology(num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=layout.replicas)
        with groups_of_mesh(plan.mesh):
            super().__init__(specs, partition_method="uniform", activation_checkpoint_interval=0, topology=topology)

    def _of_layers(self, shared: dict[str, nn.Module]) -> Iterator[LayerSpec]:
        """The embedding and the blocks."""
        plan = self.plan
        yield LayerSpec(EmbeddingStage, plan, shared)
        for index in range(len(plan.blocks)):
            if index not in plan.inside:
                yield LayerSpec(BlockStage, plan, index, shared)
            else:  # the whole core is at the place of its first block
                first = index == plan.inside.start
                yield LayerSpec(CoreStage, plan, shared) if first else LayerSpec(nn.Identity)

    def _of_whole(self, shared: dict[str, nn.Module]) -> Iterator[LayerSpec]:
        """The same of a class that is the whole model. The layers of a stage are at its first place."""
        stage = load(self.plan.whole).stage()
        for place in range(len(self.plan.blocks) + 1):
            if place in self._bounds:
                yield LayerSpec(stage, self.plan, range(place, self._bounds[self._bounds.index(place) + 1]), shared)
            else:
                yield LayerSpec(nn.Identity)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
        """The layers of a stage. Between stages all floats of the stream are one tensor."""
        stage, layout = self.stage, self.plan.mesh.layout
        config, cut = self.plan.config, layout.tensor if layout.sequence else 1
        wire, hidden = config.parallel.communication.compress.pipeline, self.plan.width
        if stage > 0:
            before = self.plan.form_at(self.parts[stage] - 1)
            if wire != "none":
                stream = unpack_rows(inputs[0], wire, before.common_width(hidden, cut), self.plan.stream_dtype)
                inputs = (stream if before.channels else stream.unflatten(1, (-1, hidden)), *inputs[1:])
            inputs = before.split(inputs, hidden, cut)
        outputs: Any = inputs
        for layer in self._layers[stage]:
            outputs = layer(outputs)
        if stage == len(self.parts) - 2:
            return outputs
        after = self.plan.form_at(self.parts[stage + 1] - 1)
        stream, *others = after.join(outputs)
        return pack_rows(stream, wire, after.common_width(hidden, cut)), *others

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = self._bounds
        stage = self.plan.mesh.pipeline.rank
        self._set_bounds(self.parts[stage], self.parts[stage + 1])

    def _build(self) -> None:
        axis = self.plan.mesh.pipeline
        self._places: list[int] = []
        for stage in (stage for stage, home in enumerate(self._homes) if home == axis.rank):
            places = range(self.parts[stage], self.parts[stage + 1])
            self._layers[stage] = [self._layer_specs[place].build() for place in places]
            self._places += places
            for place, layer in zip(places, self._layers[stage]):
                self.fwd_map[str(place)] = len(self.forward_funcs)
                self.forward_funcs.append(layer)
                self.add_module(str(place), layer)
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = is_copy(parameter)

    def layers_of(self, stage: int) -> list[nn.Module]:
        """The layers of one of this rank's stages."""
        return self._layers[stage]

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        return super().ckpt_layer_path(ckpt_dir, self._places[local_layer_idx] - self._local_start)

    def passes_of_weights(self) -> dict[nn.Parameter, int]:
        """Stages of this rank that use a parameter, if there are several: each has a backward pass of its own."""
        axis, found = self.plan.mesh.pipeline, dict[nn.Parameter, int]()
        for prefix, stages in users(self.plan.config).items():
            times = sum(self._homes[stage] == axis.rank for stage in stages)
            if times > 1:
                found |= dict.fromkeys(self._named(prefix), times)
        return found

    def stages_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """This rank's stages that use a parameter."""
        if not self._users:
            held = {stage: [p for each in layers for p in each.parameters()] for stage, layers in self._layers.items()}
            self._users = stages_of_parameters(self.plan.config, self.plan.mesh.pipeline.rank, held)
        return self._users[parameter]

    def bucket_of(self, parameter: nn.Parameter) -> tuple[tuple[int, ...], str]:
        """Parameters of one bucket are used by the same stages. Those with copies on other ranks have their own, so
        that its parts are the same there."""
        copied = any(parameter is weight for weight, _ in self.tied)
        return self.stages_of(parameter), logical_of(parameter).name if copied else ""

    def _named(self, prefix: str) -> Iterator[nn.Parameter]:
        return (each for each in self.parameters() if logical_of(each).name.startswith(f"{prefix}."))

    def _index_tied_modules(self) -> dict:
        axis, held = self.plan.mesh.pipeline, copies(self.plan.config)
        for stages in sorted(set(held.values())):
            # Stages without a copy make a group of their own: torch names a group by the number that its members have
            # joined. A rank with fewer groups than its peers would wait for them forever, under another name.
            members = [axis.ranks[stage] for stage in (stages if axis.rank in stages else (axis.rank,))]
            self._copy_groups[stages] = new_group(members, self.plan.mesh.timeout)
        return {}

    def find_copies(self) -> None:
        """Mark the parameters that other stages have too, and list what is summed over them."""
        axis, held = self.plan.mesh.pipeline, copies(self.plan.config)
        for weight in sorted(self.parameters(), key=lambda p: logical_of(p).name):
            stages = next((at for prefix, at in held.items() if logical_of(weight).name.startswith(f"{prefix}.")), ())
            if axis.rank in stages:
                weight.ds_pipe_replicated = axis.rank != stages[0]
                if weight.requires_grad:
                    self.tied.append((weight, self._copy_groups[stages]))

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, dist.ProcessGroup]]:
        """(weight, group) of each sum, in the order of names: the same for all members of a group."""
        return self.tied

    @property
    def head_stage(self) -> HeadStage | None:
        return next((layer for layer in self.forward_funcs if isinstance(layer, HeadStage)), None)


def stream_inputs(form: StreamForm, tokens: Tensor, extras: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Inputs of `EmbeddingStage`: tokens, and the side channels in the form's order."""
    return (tokens, *(extras[name] for name in form.optional))


def stream_buffers(plan: ModelPlan, border: int, samples: int, positions: int) -> list[Tensor]:
    """Empty tensors for what a stage receives that begins with layer `border`: the floats, then the side channels.

    Args:
        samples, positions: of a micro-batch, on this rank.
    """
    config, layout, form = plan.config, plan.mesh.layout, plan.form_at(border - 1)
    cut = layout.tensor if layout.sequence else 1
    hidden, wire = plan.width, config.parallel.communication.compress.pipeline
    compute = "fp32" if config.model.residual.fp32 else config.precision.compute
    elements = positions // cut * form.sample_width(hidden, cut)
    dtype, elements = between_stages(wire, elements, form.common_width(hidden, cut), compute)
    # all floats of a sample are one row if there are channels, or if the stream is compressed
    shape = [samples, elements] if form.channels or wire != "none" else [samples, positions // cut, hidden]
    found = [torch.empty(shape, dtype=COMPUTE_TYPES[dtype], device=plan.device)]
    for name in form.optional:
        size, kind = ([samples], torch.int64) if name == "samples" else ([samples, positions], torch.int32)
        found.append(torch.empty(size, dtype=kind, device=plan.device))
    return found
