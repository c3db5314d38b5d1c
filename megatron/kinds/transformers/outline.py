"""The stack of blocks in a class of transformers, and a run of them as a pipeline stage.

Each stage calls the class's own pass, which makes masks and rotary angles from positions. Blocks of other stages pass
their input on, and the one before the first own block gives what the stage received. Embedding and last norm have
stand-ins without memory where another stage has them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from megatron.worker.place import StartError

from .facts import FactsError
from .probe import other_parts

ANY = 2  # a token's number, where a stage has none
STAGES = "parallel.pipeline"
FIX = "use parallel.pipeline: 1. ZeRO splits the states of any model"


def stack_of(model: PreTrainedModel) -> tuple[str, list[nn.Module]]:
    """The name and the blocks of the largest list of modules. Empty, unless it has the layers of the settings."""
    own = ((name, each) for name, each in model.named_modules() if not name.startswith(other_parts(model)))
    lists = [(name, each) for name, each in own if isinstance(each, nn.ModuleList)]
    name, found = max(lists, key=lambda each: sum(p.numel() for p in each[1].parameters()), default=("", ()))
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    return (name, list(found)) if len(found) == layers else ("", [])


ROUTERS = ("gate", "router", "shared_expert_gate")


def linears_of(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers of blocks that may have adapters, by name: without experts, routers, and layers that share
    their weights, which would be several sums in one matrix."""
    prefix, _ = stack_of(model)
    users = Counter(id(each.weight) for each in model.modules() if isinstance(each, nn.Linear))
    return {
        name: each
        for name, each in model.named_modules()
        if prefix and name.startswith(f"{prefix}.") and isinstance(each, nn.Linear)
        if ".experts." not in name and name.rpartition(".")[2] not in ROUTERS and users[id(each.weight)] == 1
    }


@dataclass
class Window:
    """A run of blocks.

    Attributes:
        start, stop, count: of the blocks of the class, those from start to stop - 1 are here.
        received: input of the first one, unless it is the first of all.
        left: input of the block after the last one.
    """

    start: int
    stop: int
    count: int
    received: Tensor | None = None
    left: Tensor | None = None

    @property
    def last(self) -> bool:
        return self.stop == self.count

    def through(self, call: Callable[[], Any], x: Tensor | None) -> Any:
        """The output of this run's last block, or of the class if it is the last of all.

        Args:
            call: the class.
        """
        self.received, self.left = x, None
        output, left = call(), self.left
        self.received = self.left = None
        return output if self.last else left


class Elsewhere(nn.Module):
    """In the place of a block of another stage.

    Args:
        outputs: length of the block's tuple of outputs. 0: it returns a tensor.
    """

    def __init__(self, block: nn.Module, index: int, window: Window, outputs: int) -> None:
        super().__init__()
        # A class may read a block's own attributes, such as its type of attention.
        vars(self).update({name: each for name, each in vars(block).items() if name not in (*vars(self), "forward")})
        self._place, self._window, self._outputs = index, window, outputs

    def forward(self, *args: Any, **more: Any) -> Any:
        x, window = hidden_of(args, more), self._window
        if self._place == window.stop:
            window.left = x
        if self._place == window.start - 1 and window.received is not None:
            x = window.received
        return (x, *[None] * (self._outputs - 1)) if self._outputs else x


def hidden_of(args: tuple[Any, ...], more: dict[str, Any]) -> Tensor:
    """The stream among the arguments of a block."""
    return args[0] if args else more.get("hidden_states", next(iter(more.values())))


@dataclass
class Stages:
    """A class that can be cut between blocks.

    Attributes:
        outputs: see `Elsewhere`.
        first, last: identities of parameters outside of the blocks that the first and the last stage use.
    """

    model: PreTrainedModel
    name: str
    blocks: list[nn.Module]
    outputs: int = 0
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)

    def outside(self) -> dict[str, nn.Parameter]:
        """Parameters that are in no block."""
        inside = {id(each) for block in self.blocks for each in block.parameters()}
        return {name: each for name, each in self.model.named_parameters() if id(each) not in inside}

    def install(self, window: Window) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Put stand-ins in the places of all that this window does not have.

        Returns:
            What they replaced: module, name, parameter.
        """
        stack, own = self.model.get_submodule(self.name), self.first if window.start == 0 else set[int]()
        own = own | self.last if window.last else own
        for index, block in enumerate(self.blocks):
            here = window.start <= index < window.stop
            stack[index] = block if here else Elsewhere(block, index, window, self.outputs)  # type: ignore[index]
        replaced = []
        for parameter in self.outside().values():
            if id(parameter) not in own:
                for module in self.model.modules():
                    replaced += [(module, name, each) for name, each in module._parameters.items() if each is parameter]
        for module, name, parameter in replaced:
            del module._parameters[name]
            setattr(module, name, parameter.new_zeros(()).detach().expand(parameter.shape))
        return replaced

    @contextmanager
    def installed(self, window: Window) -> Iterator[None]:
        replaced = self.install(window)
        try:
            yield
        finally:
            for module, name, parameter in replaced:
                delattr(module, name)
                module._parameters[name] = parameter
            for index, block in enumerate(self.blocks):
                self.model.get_submodule(self.name)[index] = block  # type: ignore[index]


def refused(model: PreTrainedModel, what: str) -> FactsError:
    return FactsError(STAGES, f"must be 1: {type(model).__name__} {what}", FIX)


def gathered_whole(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Modules in which tokens choose what runs. ZeRO 3 gathers each as one, on all ranks alike.

    Raises:
        StartError: the class runs parts of one outside of a pass through it.
    """
    for at, parent in model.named_modules():
        for name, child in parent.named_children():
            if name == "experts":
                if "NotImplementedError" in type(child).forward.__code__.co_names and not isinstance(
                    child, nn.ModuleList
                ):
                    raise StartError(
                        f"zero.stage must be at most 2: {type(model).__name__} calls parts of {at}.experts"
                    )
                yield parent if isinstance(child, nn.ModuleList) else child
