"""Which phase of a step and which layer the program is in, also while gradients are computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.account import Recorder
from megatron.training.hooks.communication import label_layers

from .storage_counter import ProgramPlace


class Labels(Recorder):
    """A recorder of communication that also knows whose gradient is being computed: the one of the layer whose output's
    gradient came last."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._backward = ""
        self._places: dict[tuple[str, str], ProgramPlace] = {}

    def label(self, module: nn.Module, name: str) -> None:
        """As the recorder's; and the layer's output tells when its gradient arrives."""
        super().label(module, name)

        def watch(module: nn.Module, args: Any, output: Any) -> None:
            tensor = _main(output)
            if tensor is not None and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._enter(name))

        self._handles.append(module.register_forward_hook(watch))

    def _enter(self, name: str) -> None:
        self._backward = name

    def now(self) -> ProgramPlace:
        """Where the program is."""
        phase = self.phase or "start"
        if phase == "backward" and self._layers:
            phase = "recompute"
        layer = self._layers[-1] if self._layers else self._backward if phase == "backward" else ""
        return self._places.setdefault((phase, layer), ProgramPlace(phase, layer))

    def of_engine(self, module: nn.Module) -> None:
        """Label the layers of a model or of a stage."""
        label_layers(self, module)


def _main(output: Any) -> Tensor | None:
    """The tensor on the residual stream, or the loss, of what a layer gives."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple) and output:
        return _main(output[0])
    hidden = getattr(output, "hidden", None)
    return hidden if isinstance(hidden, Tensor) else None
