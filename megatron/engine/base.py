"""Common base of both engines: their start, and the beginning and end of a step. The only call of
`deepspeed.initialize`.

The loss of a step is the mean over all labels of the global batch that count. Each label's weight is
    weight * (replicas * accumulation) / (sum of weights in the global batch).
DeepSpeed divides by the accumulation and averages gradients over the replicas, the ranks of the data and context axes.
Micro-batches and ranks with different numbers of labels thus still add up to the exact mean.
"""

import contextlib
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpoint import SOLO, Communicator, GroupCommunicator
from megatron.config import Config
from megatron.config.arithmetic.pipelines import ranks_of_stages
from megatron.config.arithmetic.wire import bucket_elements, scatters_gradients
from megatron.data.batch import StepBatch
from megatron.model.block import hands_on_states
from megatron.model.stack import ModelPlan
from megatron.parallel.layers.linear import VocabEmbedding
from megatron.parallel.layers.parameters import buffers_of, logical_of
from megatron.parallel.layout.mesh import Mesh, stage_axis
from megatron.parallel.layout.precision import COMPUTE_TYPES, to_device, use_large_pages
from megatron.parallel.messages.account import phase
from megatron.worker.beacon import Beacon

from .deepspeed.buckets import finished
from .deepspeed.clipping import GlobalClipping, global_limit
from .deepspeed.expert_groups import count_each_element_once, spread_experts
from .deepspeed.one_pass import SumsWithSquares, passes_of_adamw, write_weights_with_adamw
from .deepspeed.options import accumulation_steps, deepspeed_options, reduces_once, zero_stage
from .deepspeed.process import ModelParallelUnit, keeping_fp32
from .deepspeed.reduction import begin_sums_with_copies, reduce_nothing, report_reductions, sum_large_gradients_in_place
from .deepspeed.scattered import ScatteredGradients
from .deepspeed.step_on_device import decide_on_device
from .deepspeed.zero_copies import norms_without_copies, update_in_place
from .micro_batches import LossAccumulator, MicroBatch, micro_batches
from .optimizers.groups import build_optimizer, set_learning_rate
from .optimizers.matrix import MatrixOptimizer
from .part import EnginePart, Update
from .parts import TEACHER, build_parts
from .protocol import Arriving, LabelGroups, StepResult
from .state import EngineState
from .undo import Undo

NO_LABELS = StepResult(loss=0.0, tokens=0.0, grad_norm=None, unlabelled=True)


class BaseEngine:
    """Optimizer, clipping at stage 0, label weights and numbers of a step."""

    config: Config
    mesh: Mesh
    device: torch.device
    beacon: Beacon
    plan: ModelPlan

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        values: bool = True,
        beacon: Beacon | None = None,
        teacher: EnginePart | None = None,
    ):
        self.config, self.mesh, self.device = config, mesh, device
        self.beacon = beacon or Beacon()
        self.plan = ModelPlan(config, mesh, device, values=values)
        self.form, self.context = self.plan.form, self.plan.context
        self.batch_form = self.form  # a part may add inputs that the model itself does not read
        self.accumulation = accumulation_steps(config, mesh.layout)
        self.options = deepspeed_options(config, mesh.layout)
        self.losses = LossAccumulator.zero(device)
        self._foreseen: dict[int, tuple[StepBatch, Arriving]] = {}  # by step
        self._left = False  # whether a step has begun that did not end
        self._in_large_pages = False
        self.use_parts(build_parts(self, {TEACHER: teacher}))
        self._assemble()

    def _assemble(self) -> None:
        raise NotImplementedError

    def use_parts(self, parts: dict[str, EnginePart]) -> None:
        """Call only these parts from now on."""
        self.parts = parts
        self._points: dict[str, list[Callable[..., Any]]] = {
            point: [getattr(part, point) for part in parts.values() if point in part.points]
            for point in vars(EnginePart)
        }

    def call_parts(self, point: str, *arguments: Any) -> list[Any]:
        """Call a point of all parts that define it. Returns their results, in order."""
        return [call(*arguments) for call in self._points[point]]

    def _start(self, module: nn.Module, mpu: ModelParallelUnit | None) -> None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self.scattered: ScatteredGradients | None = None
        self.scatters = scatters_gradients(self.config, self.mesh.layout)
        bucket = bucket_elements(self.config, self.mesh.replicas.size) if self.scatters else 0
        stage = zero_stage(self.config, self.mesh.layout)
        apart = getattr(module, "bucket_of", None) if stage > 1 else None
        self.optimizer = build_optimizer(self.config, parameters, bucket, apart)
        # ZeRO's norms are exact for its own ranks. DeepSpeed's norm at stage 0 counts some elements several times.
        self.clipping = GlobalClipping(parameters, self.mesh, global_limit(self.config)) if stage == 0 else None
        self.clips = self.clipping is not None  # a part may take clipping over
        self.call_parts("before_deepspeed", self)
        if self.clipping is not None and self.clips:
            self.clipping.attach(self.optimizer)
        if self._points["before_update"]:  # inside `step`: after clipping, and only if the update was not prevented
            self.optimizer.register_step_pre_hook(lambda *_: self._before_update())
        self.deepspeed = self._initialize(module, mpu)
        self._replace_parts_of_deepspeed(stage)
        average = self.config.training.weight_average is not None
        rest = buffers_of(module), average, frozen, self._settle
        self.state = EngineState(self.deepspeed, self.optimizer, parameters, self.mesh, stage, *rest)
        self.call_parts("attach", self)
        self.undo = Undo(self.state, self.parts)
        if self.device.type == "cpu":  # the first update makes the last tensors that stay
            self.optimizer.register_step_post_hook(lambda *_: self._keep_in_large_pages(parameters))
        if isinstance(self.optimizer, MatrixOptimizer):  # last: it finds each matrix in the state
            held = self.state.held(lambda group: group["matrix"])
            self.optimizer.attach(held, stage_axis(self.mesh), self.device)

    def _replace_parts_of_deepspeed(self, stage: int) -> None:
        """Each call replaces methods of DeepSpeed's engine or optimizer. A later one may replace an earlier one's."""
        if self.mesh.replicas.size == self.mesh.expert_data.size == 1:
            reduce_nothing(self.deepspeed, stage)
        each = stage > 1 and not reduces_once(self.config, self.mesh.layout)
        count_each_element_once(self.deepspeed.optimizer, self.mesh)
        report_reductions(self.deepspeed, self.beacon, each)
        kernels = passes_of_adamw(self.deepspeed.optimizer, self.optimizer)
        if not self.scatters:
            sum_large_gradients_in_place(self.deepspeed)
            squares, mesh = None, self.mesh
            # Of gradients whose sums nothing changes after the backward pass: no other rank or stage adds to them.
            if kernels is not None and max(mesh.replicas.size, mesh.expert_data.size, mesh.pipeline.size) == 1:
                squares = SumsWithSquares(self.deepspeed.optimizer.fp32_groups_gradients, kernels)
            takes_rows, model = begin_sums_with_copies(self.deepspeed.optimizer, squares), self.config.model
            if takes_rows and self.device.type == "cpu" and not (model.embedding.tied or model.further_blocks):
                for table in (each for each in self.deepspeed.module.modules() if isinstance(each, VocabEmbedding)):
                    table.sparse = True  # its weight is used once
        if kernels is not None:
            write_weights_with_adamw(self.deepspeed.optimizer, self.optimizer, kernels)
        decide_on_device(self.deepspeed.optimizer, self.optimizer)
        norms_without_copies(self.deepspeed.optimizer)
        update_in_place(self.deepspeed.optimizer)
        if self.scatters:
            self.scattered = self._scattered(each, kernels)

    def _scattered(self, each: bool, kernels: Any | None) -> ScatteredGradients:
        precision, module = self.config.precision, self.deepspeed.module
        return ScatteredGradients(
            self.deepspeed,
            self.mesh,
            finished(module),
            self.accumulation,
            each,
            wire=COMPUTE_TYPES["fp32" if precision.compute == "fp32" else precision.reduce],
            late=hands_on_states(module),  # a rank that waits for another's state would hold up its bucket
            kernels=kernels,
        )

    def _before_update(self) -> None:
        self.call_parts("before_update")

    def _keep_in_large_pages(self, parameters: Sequence[Tensor]) -> None:
        if not self._in_large_pages:
            self._in_large_pages = True
            flats = [each for group in self.optimizer.param_groups for each in group["params"]]
            states = [state for each in flats for state in self.optimizer.state.get(each, {}).values()]
            kept = (*parameters, *flats, *(each.grad for each in flats), *states)
            use_large_pages((each for each in kept if isinstance(each, Tensor)), heap=True)

    def start_at(self, step: int) -> None:
        """The next update is number `step`: the run begins there, or evaluates its weights of that time."""
        self.call_parts("start_at", step)

    def _begin(self, step: int, micro_batches: int, lr: float) -> None:
        if self._left:
            raise RuntimeError("an earlier step failed or was dropped, and left gradients: build the engine again")
        self._left = True
        self.state.for_training()
        set_learning_rate(self.optimizer, lr)
        self.losses = LossAccumulator.zero(self.device)
        if self.scattered is not None:
            self.scattered.begin()
        self.call_parts("before_step", step, micro_batches)
        self.undo.begin()  # asks the parts whether this is a trial

    def _initialize(self, module: nn.Module, mpu: ModelParallelUnit | None) -> Any:
        import deepspeed

        if self.options["zero_optimization"]["stage"] > 0 and hands_on_states(module):
            # DeepSpeed would sum a full bucket during the backward pass: the next rank would wait for it, and this rank
            # for the gradient of a state from the next one.
            section = self.options["zero_optimization"]
            section["reduce_bucket_size"] = max(
                section["reduce_bucket_size"], sum(p.numel() for p in module.parameters())
            )
        with keeping_fp32(module.parameters()), spread_experts(self.optimizer, self.mesh):
            return deepspeed.initialize(
                model=module,
                optimizer=self.optimizer,
                config=self.options,
                mpu=mpu,
                dist_init_required=False,
                model_parameters=[p for p in module.parameters() if p.requires_grad],
            )[0]

    @property
    def communicator(self) -> Communicator:
        several = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
        return GroupCommunicator(device=self.device) if several else SOLO

    @property
    def module(self) -> nn.Module:
        self._settle()
        return self.deepspeed.module

    def _settle(self) -> None:
        """Wait for weights that are being gathered, before any code but the next step reads them."""
        if self.scattered is not None:
            self.scattered.gathers.settle()

    def save_native(self, folder: Path, tag: str, step: int) -> dict[str, str]:
        """Write a checkpoint in DeepSpeed's own format, `<folder>/<tag>`. Every rank calls it.

        Returns:
            The name in that checkpoint of each parameter, by its logical name.
        """
        self._settle()
        self.deepspeed.global_steps = step
        self.deepspeed.save_checkpoint(str(folder), tag=tag, client_state={"universal_checkpoint_info": {}})
        return {logical_of(parameter).name: name for name, parameter in self.deepspeed.module.named_parameters()}

    def begin_average(self) -> None:
        self.state.begin_average()

    def advance_average(self, coefficient: float) -> None:
        self.state.advance_average(coefficient)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        return self.state.averaged()

    def _micro_batches(self, batch: StepBatch, scale: Tensor | float, depth: int = 0) -> Iterator[MicroBatch]:
        self.call_parts("check_batch", batch)
        return micro_batches(batch, self.batch_form, scale, self.device, self.context, depth)

    @property
    def reports(self) -> bool:
        """Whether this rank reports its labels: each label is reported by one rank."""
        return self.mesh.at.tensor == 0 and self.mesh.at.pipeline == ranks_of_stages(self.config.parallel)[-1]

    def _losses_of(self, ce_BS: Tensor, weights_BS: Tensor, *more: Tensor) -> None:
        self.losses.add(ce_BS, weights_BS)
        self.call_parts("after_micro_batch", ce_BS, weights_BS, *more)

    def _accumulator(self, groups: LabelGroups | None) -> LossAccumulator:
        made = LossAccumulator.zero(self.device)
        if groups is not None and self.reports:
            made.groups = iter(self.context.cut(groups.ids.to(self.device), 2))
            made.sums = groups.sums
        return made

    def _scale(self, batch: StepBatch) -> float | Tensor | None:
        """Replicas times accumulation over the weight of all labels of the global batch. None if that weight is 0.

        In runs whose labels have weights, the host waits for the sum over several data ranks, if it was not foreseen.
        """
        factor = self.mesh.replicas.size * batch.tokens.shape[0]
        if batch.loss_mask is None:
            return factor / (self.mesh.data.size * batch.tokens[..., 1:].numel())
        ahead = self._foreseen.get(batch.step)
        weight = ahead[1].read() if ahead and ahead[0] is batch else self._weight(batch.loss_mask)
        return to_device((factor / weight).float(), self.device) if float(weight) else None

    @phase("exchange")
    def foresee(self, batch: StepBatch) -> None:
        if batch.loss_mask is not None:
            self._foreseen = {step: ahead for step, ahead in self._foreseen.items() if step > batch.step - 2}
            self._foreseen[batch.step] = batch, Arriving(self._weight(batch.loss_mask))

    def _weight(self, mask: Tensor) -> Tensor:
        """Of all labels of the global batch, float64."""
        weight = mask.sum(dtype=torch.float64)
        if self.mesh.data.size > 1:
            weight = to_device(weight, self.device)
            dist.all_reduce(weight, group=self.mesh.data.group)
        return weight

    def _result(self) -> StepResult:
        norm = self.clipping.norm if self.clipping else self.deepspeed.get_global_grad_norm()
        update = Update(self.deepspeed.was_step_applied(), self.losses.weight)
        overflow = not update.applied and self.config.precision.compute == "fp16"
        extras = [each for each in self.call_parts("after_update", update) if each]
        self.undo.end(update.applied)
        self._left = False
        return StepResult(
            loss=self.losses.mean if self.reports else 0.0,
            tokens=self.losses.labels if self.reports else 0.0,
            grad_norm=norm,
            skipped=overflow,
            spike=update.spike,
            extras=(extras or [{}])[0] if len(extras) < 2 else ChainMap(*extras),
        )
