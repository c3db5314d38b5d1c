"""Checks of a class of transformers that is cut: its logits and gradients equal the uncut class."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron.parallel.layers.collectives import all_reduce
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.mesh import Axis

from .cut import part_of
from .cut import refused as not_cut
from .outline import ANY, Stages, Window, hidden_of, refused, stack_of
from .probe import SMALL, TOKENS, output_of, read, same

CLOSE = 1e-4  # other orders of fp32 sums through all layers, relative to the largest number of a tensor


def tokens_of(vocabulary: int) -> Tensor:
    """Int64 [2, TOKENS]."""
    return (torch.arange(2 * TOKENS).view(2, TOKENS) * 5 + 1) % vocabulary


def weights_of(x: Tensor) -> Tensor:
    """For each element of a tensor another weight in a sum. All are positive."""
    return 1 + 0.5 * torch.sin(torch.arange(1.0, x.numel() + 1, device=x.device)).view_as(x)


def checked(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters whose gradients are compared: of a large model, vectors. All, if it has none."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    vectors = [each for each in parameters if each.ndim < 2]
    small = sum(each.numel() for each in model.parameters()) < SMALL
    return parameters if small or not vectors else vectors


def gradients(y: Tensor, parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """Of a sum of an output, in which each element has another weight."""
    return list(torch.autograd.grad((y * weights_of(y)).sum(), parameters, allow_unused=True))


def stages_of(model: PreTrainedModel, bounds: list[tuple[int, int]]) -> Stages:
    """The class, ready to be cut into these runs of blocks, which were compared with the whole.

    Args:
        model: on the host, whole, in fp32.

    Raises:
        FactsError: it is another function when it is cut.
    """
    name, blocks = stack_of(model)
    stages, was_training = Stages(model, name, blocks), model.training
    _own_parameters(stages, bounds)
    model.eval()
    plain = with_noise(model)
    try:
        with torch.enable_grad():
            _check(stages, bounds)
    except (RuntimeError, AttributeError, TypeError, IndexError, ValueError, KeyError) as error:
        # FactsError is a ValueError, and the class may raise any of these
        if hasattr(error, "rule"):
            raise
        raise refused(model, f"cannot run a part of {name}: {type(error).__name__}: {str(error)[:200]}") from error
    finally:
        model.train(was_training)
        for name, values in plain.items():
            model.get_parameter(name).data = values
    return stages


def _own_parameters(stages: Stages, bounds: list[tuple[int, int]]) -> None:
    """Two stages would each have the gradient of their own uses only."""
    names, users = {id(each): name for name, each in stages.model.named_parameters()}, dict[int, int]()
    for stage, (start, stop) in enumerate(bounds):
        for parameter in (each for block in stages.blocks[start:stop] for each in block.parameters()):
            if users.setdefault(id(parameter), stage) != stage:
                raise refused(stages.model, f"shares {names[id(parameter)]} among blocks of several stages")


def _check(stages: Stages, bounds: list[tuple[int, int]]) -> None:
    model, inputs, outputs = stages.model, list[Any](), list[Any]()

    def called(_: nn.Module, args: tuple[Any, ...], more: dict[str, Any], output: Any) -> None:
        inputs.append(hidden_of(args, more))
        outputs.append(output)

    hooks = [block.register_forward_hook(called, with_kwargs=True) for block in stages.blocks]
    tokens, parameters = tokens_of(output_of(model).weight.shape[0]), checked(model)
    try:
        logits = read(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    width = output_of(model).weight.shape[1]
    kinds = {len(each) if isinstance(each, tuple) else 0 for each in outputs}
    if len(inputs) != len(stages.blocks) or len(kinds) != 1:
        raise refused(model, f"must call each block of {stages.name} once, and calls {len(inputs)}")
    if any(not isinstance(each, Tensor) or each.shape != (*tokens.shape, width) for each in inputs):
        raise refused(model, f"has a stream of another form than [batch, sequence, {width}] in {stages.name}")
    (stages.outputs,) = kinds
    wanted = gradients(logits, parameters)
    _find_users(stages, tokens)
    x: Any = None
    for start, stop in bounds:
        window = Window(start, stop, len(stages.blocks))
        with stages.installed(window):
            x = window.through(_call(model, tokens if start == 0 else torch.full_like(tokens, ANY)), x)
        if stop < len(stages.blocks) and not same(x, inputs[stop]):
            raise refused(model, f"computes something else in a part of its blocks, before {stages.name}.{stop}")
    if not same(x, logits):
        raise refused(model, f"has other logits with stages of {stages.name}")
    names = {id(each): name for name, each in model.named_parameters()}
    for parameter, found, whole in zip(parameters, gradients(x, parameters), wanted, strict=True):
        if whole is not None and (found is None or not same(found, whole)):
            raise refused(model, f"has other gradients of {names[id(parameter)]} with stages")


def _call(model: PreTrainedModel, tokens: Tensor) -> Callable[[], Tensor]:
    return lambda: read(model, tokens)


def _find_users(stages: Stages, tokens: Tensor) -> None:
    """Which stages use the parameters outside of blocks."""
    model, outside, count = stages.model, stages.outside(), len(stages.blocks)
    everything = {id(each) for each in outside.values()}
    used = []
    stages.first = stages.last = everything  # no stand-ins for parameters
    for start, stop in ((0, 1), (count - 1, count)):
        window = Window(start, stop, count)
        x = None if start == 0 else torch.ones(*tokens.shape, output_of(model).weight.shape[1], requires_grad=True)
        with stages.installed(window):
            y = window.through(_call(model, tokens), x)
        found = gradients(y, list(outside.values()))
        used.append({id(each) for each, gradient in zip(outside.values(), found) if gradient is not None})
    head = output_of(model).weight
    table = getattr(model.get_input_embeddings(), "weight", None)
    for name, each in outside.items():
        if id(each) in used[0] & used[1] and not (each is head and each is table):
            raise refused(model, f"uses {name} in several stages")
    stages.last = used[1]
    stages.first = used[0] | (everything - used[1])  # also what no stage uses


NOTHING = 1e-3  # of the largest gradient: smaller ones are rounding, as of biases of keys, which have no effect
NOISE = 0.1  # added to plain parameters for the comparison


def with_noise(model: nn.Module) -> dict[str, Tensor]:
    """Add noise to vectors, and to tensors whose elements are all equal: a bias of 0 could be added twice, and behind a
    gate of 0 anything could be wrong. Returns their own values."""
    own = {name: each.data.clone() for name, each in model.named_parameters() if each.ndim < 2 or _is_constant(each)}
    for number, (name, values) in enumerate(own.items()):
        noise = torch.sin(torch.arange(values.numel(), dtype=values.dtype) * 1.7 + number)
        model.get_parameter(name).data = values + NOISE * noise.view_as(values)
    return own


def _is_constant(values: Tensor) -> bool:
    least, largest = torch.aminmax(values.detach())
    return bool(least == largest)


class Uncut:
    """The class before it is cut over tensor parallel ranks: its results with noise in plain parameters, and their own
    values.

    Args:
        run: the output [B, S, H] of the class, or of a pipeline stage's blocks.
        head: costs of tokens [B, S] from that output. None: the stage has no head.
    """

    def __init__(self, model: PreTrainedModel, run: Callable[[], Tensor], head: Callable[[Tensor], Tensor] | None):
        self.model, self.run = model, run
        whole = [each for each in model.parameters() if each.requires_grad and logical_of(each).shard is None]
        compared = set(map(id, [*checked(model), *whole]))
        self.parameters = {name: each for name, each in model.named_parameters() if id(each) in compared}
        self.plain = with_noise(model)
        self.outputs, self.costs, found = self.computed(head, self.parameters)
        self.gradients = {name: each for name, each in found.items() if each is not None}
        self.largest = max(each.abs().max().item() for each in self.gradients.values())
        self.wholes = {name: logical_of(each) for name, each in self.parameters.items()}

    def computed(
        self, head: Callable[[Tensor], Tensor] | None, parameters: dict[str, nn.Parameter]
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor | None]]:
        """(outputs of all modules in their order, the last output, gradients)."""
        outputs: dict[str, Tensor] = {}
        self.inside: list[str] = []

        def begun(name: str) -> Callable[..., None]:
            return lambda *_: self.inside.append(name)

        def ended(name: str) -> Callable[..., None]:
            def keep(_: nn.Module, args: Any, output: Any) -> None:
                self.inside.pop()
                y = output[0] if isinstance(output, tuple) and output else output
                if isinstance(y, Tensor):
                    outputs[name] = y.detach().clone()

            return keep

        hooks = []
        for name, module in self.model.named_modules():
            if name:
                hooks += [module.register_forward_pre_hook(begun(name)), module.register_forward_hook(ended(name))]
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.enable_grad():
                y = self.run()
                y = y if head is None else head(y)
                return outputs, y.detach(), dict(zip(parameters, gradients(y, list(parameters.values()))))
        finally:
            self.model.train(was_training)
            for hook in hooks:
                hook.remove()

    def compare(self, head: Callable[[Tensor], Tensor] | None, axis: Axis) -> list[str]:
        """Check the class, which is now cut and on its device, and give its parameters their own values again.

        Returns:
            Names of whole parameters whose gradient is a sum over the ranks.

        Raises:
            FactsError: it is another function, with the first module that is.
        """
        now = dict(self.model.named_parameters())
        parameters = {name: now[name] for name in self.parameters if name in now}
        said, found = "", dict[str, Tensor | None]()
        try:
            outputs, costs, found = self.computed(head, parameters)
            said = self._different(outputs, costs)
        except (RuntimeError, AttributeError, TypeError, IndexError, ValueError, KeyError) as error:
            said = f"cannot compute {(self.inside or ['its logits'])[-1]}: {type(error).__name__}: {str(error)[:200]}"
        self._raise(said, axis)
        wrong = [name for name in self.gradients if name in parameters and not self._right(name, found[name], axis)]
        partial = self._agreed(wrong, axis)
        sums = {name: all_reduce(_or_zeros(found[name], parameters[name]), axis) for name in partial}
        wrong = [name for name in partial if self.wholes[name].shard or not self._right(name, sums[name], axis)]
        self._raise(f"has other gradients of {wrong[0]}" if wrong else "", axis)
        for name, values in self.plain.items():
            if name in now:
                now[name].data.copy_(part_of(values, now[name], axis))
        return partial

    def _different(self, outputs: dict[str, Tensor], costs: Tensor) -> str:
        """The first module with another result, if there is one."""
        if same(costs.cpu(), self.costs, CLOSE):
            return ""
        for name, whole in self.outputs.items():
            found = outputs.get(name)
            if found is not None and found.shape == whole.shape and not same(found.cpu(), whole, CLOSE):
                return f"computes something else in {name}, with the cuts of its plan"
        return "has other logits with the cuts of its plan"

    def _right(self, name: str, found: Tensor | None, axis: Axis) -> bool:
        shard, whole = self.wholes[name].shard, self.gradients[name]
        if found is None:
            return False
        if shard is not None:
            spans = shard.spans(whole.shape[shard.dim], axis.rank, axis.size)
            whole = torch.cat([whole.narrow(shard.dim, each.start, each.length) for each in spans], shard.dim)
        largest = max(self.gradients[name].abs().max().item(), NOTHING * self.largest)
        return (found.cpu() - whole).abs().max().item() <= CLOSE * largest

    def _agreed(self, names: list[str], axis: Axis) -> list[str]:
        """The names of all ranks, in order."""
        every: list[Any] = [None] * axis.size
        dist.all_gather_object(every, names, group=axis.group)
        return sorted({name for each in every for name in each})

    def _raise(self, said: str, axis: Axis) -> None:
        for each in self._agreed([said] if said else [], axis)[:1]:
            raise not_cut(self.model, each)


def _or_zeros(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient.clone()
