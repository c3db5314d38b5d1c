"""Gradient norm over all axes and clipping by it, for stage 0. DeepSpeed's own is per pipeline stage there."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.features.feature import wanted_features
from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layers.parameters import is_spread, logical_of, on_every_tensor_rank
from megatron.parallel.layout.mesh import Mesh

from .sum_of_squares import sum_of_squares


def global_limit(config: Config) -> float:
    """Largest gradient norm over all tensors. 0 where each tensor has its own bound."""
    clipped = any(feature.clips(config) for feature in wanted_features(config).values())
    return 0.0 if clipped else config.optimizer.gradient_clipping


class GlobalClipping:
    """Scales gradients so that their global norm is at most `limit`, just before the optimizer's step.

    Attributes:
        norm: of the last step, before clipping, 0-d.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: Mesh, limit: float):
        self.parameters, self.mesh, self.limit = list(parameters), mesh, limit
        self.norm: Tensor | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> "GlobalClipping":
        optimizer.register_step_pre_hook(lambda *_: self())
        return self

    def __call__(self) -> None:
        self.norm = self._norm()
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.limit <= 0 or not grads:
            return
        factor = (self.limit / (self.norm + 1e-6)).clamp(max=1.0)
        if factor.device.type != "cpu" or factor < 1.0:  # reading it from an accelerator would wait
            torch._foreach_mul_(grads, factor)

    def _norm(self) -> Tensor:
        """Counts each logical element once. Shards are summed over the tensor axis, experts and rows over the expert
        axis (and over the ranks with slices of them). Replicas and tied copies are not counted."""
        counted = [
            (p, p.grad) for p in self.parameters if p.grad is not None and not getattr(p, "ds_pipe_replicated", False)
        ]
        whole = self._sum_of_squares([grad for p, grad in counted if logical_of(p).shard is None and not is_spread(p)])
        cut = [grad for p, grad in counted if logical_of(p).shard is not None and not is_spread(p)]
        shards = self._sum_of_squares(cut)
        ranks, spread = self.mesh.tensor.size, [(p, grad) for p, grad in counted if is_spread(p)]
        alike = [grad for p, grad in spread if ranks > 1 and on_every_tensor_rank(p)]
        experts = self._sum_of_squares([grad for p, grad in spread if ranks == 1 or not on_every_tensor_rank(p)])
        if alike:
            experts = experts + self._sum_of_squares(alike) / ranks
        experts = all_reduce(experts, self.mesh.expert)
        if self.mesh.layout.folded:
            whole = whole + experts
        else:
            shards = shards + experts
        total = whole + all_reduce(shards, self.mesh.tensor)
        return all_reduce(total, self.mesh.pipeline).sqrt()

    def _sum_of_squares(self, tensors: list[Tensor]) -> Tensor:
        return sum_of_squares(tensors) if tensors else self.parameters[0].new_zeros((), dtype=torch.float32)
