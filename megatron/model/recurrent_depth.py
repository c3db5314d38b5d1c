"""A core of blocks that is repeated with the same weights (Geiping et al. 2025, arXiv 2502.05171).

e = prelude(embedding). s_0 ~ N(0, state_std^2), cut off at three standard deviations. s_{i+1} = core(W [s_i, e]). The
coda reads norm(s_r). The first passes of a step run without gradients ("truncated backpropagation through depth").

Shapes: B samples, S positions of this rank's tensor parallel group, s of this rank, H hidden."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.config.arithmetic.recurrence import Passes, passes_of_step, split
from megatron.config.sections.model import RecurrenceOptions
from megatron.parallel.layers.linear import sequence_slice
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.random import sequence_counters, site_key, uniform

from .block import Block, BlockState
from .norm import Norm
from .stream import INJECTED, Stream

CUT = 3.0  # standard deviations beyond which no state starts


@dataclass
class Depth:
    """Number of passes through the core, now."""

    options: RecurrenceOptions
    seed: int
    step: int | None = None  # number of the training step. None where no engine trains.
    chosen: int | None = None  # passes in evaluation, instead of `evaluation`.
    # Evaluation ends earlier when a pass changes the newest token's state by at most this share
    tolerance: float | None = None
    taken: int = 0  # passes of the last evaluation

    def passes(self, training: bool) -> Passes:
        """The passes now, equal on all ranks."""
        if training and self.step is not None:
            return passes_of_step(self.options, self.seed, self.step)
        return split(self.chosen or self.options.evaluation, self.options)

    @contextlib.contextmanager
    def at(self, passes: int | None, tolerance: float | None = None) -> Iterator[None]:
        """Evaluate with this number of passes, or with at most this number and a tolerance, inside of the context."""
        before = self.chosen, self.tolerance
        self.chosen, self.tolerance = passes, tolerance
        try:
            yield
        finally:
            self.chosen, self.tolerance = before


class InitialState:
    """The state before the first pass, a function of seed and position, and in training also of the sample.

    Outside of training a text has the same results at every place of a batch."""

    def __init__(self, make: ParameterFactory, options: RecurrenceOptions):
        self.mesh, self.context, self.std = make.mesh, make.context, options.state_std
        self.key = site_key(make.seed, "recurrence", "state")

    def __call__(self, stream: Stream, training: bool, begin: int | Tensor) -> Tensor:
        like = stream.hidden
        if isinstance(begin, Tensor):  # rows of one token each, as one text
            rows = replace(stream, hidden=like.transpose(0, 1))
            return self._at(rows, training, begin.squeeze(1)).transpose(0, 1)
        cut = self.mesh.tensor.size if self.mesh.layout.sequence else 1
        places = self.context.places(like.shape[1] * cut, like.device) + begin
        return self._at(stream, training, sequence_slice(places, self.mesh, 0))

    def _at(self, stream: Stream, training: bool, places_s: Tensor) -> Tensor:
        like = stream.hidden
        counters = sequence_counters(places_s, like.shape[2])
        none = torch.zeros(like.shape[0], dtype=torch.int64, device=like.device)
        share = uniform(self.key, stream.sample_numbers if training else none, counters).double()
        outside = 0.5 * (1.0 - math.erf(CUT / math.sqrt(2.0)))
        normal = math.sqrt(2.0) * torch.erfinv(2.0 * (outside + (1.0 - 2.0 * outside) * share) - 1.0)
        return (self.std * normal).to(like.dtype)


class Core:
    """Runs the repeated blocks. No module, for its blocks are in the model, or in a pipeline stage.

    Args:
        norm: of the state after the last pass. None leaves it as it is.
    """

    def __init__(self, depth: Depth, blocks: Sequence[Block], start: InitialState, norm: Norm | None):
        self.depth, self.blocks, self.start, self.norm = depth, list(blocks), start, norm

    def __call__(self, stream: Stream, states: list[list[BlockState]] | None = None, begin: int | Tensor = 0) -> Stream:
        """The prelude's stream to the input of the coda.

        Args:
            states: decoding states, a list for each pass. See `new_state`.
            begin: the position of the first token, where positions are not given (decoding).
        """
        training, channels = self.blocks[0].training, stream.channels
        passes = self.depth.passes(training)
        stream = stream.with_channels({INJECTED: stream.hidden}).with_hidden(self.start(stream, training, begin))
        for number in range(int(passes.total)):
            before = stream.hidden
            with torch.set_grad_enabled(torch.is_grad_enabled() and number >= passes.without):
                for place, block in enumerate(self.blocks):
                    stream = block(stream) if states is None else block(stream, states[number][place])
            if not training:
                self.depth.taken = number + 1
                if self._settled(before, stream.hidden):
                    break
        x = stream.hidden if self.norm is None else self.norm(stream.hidden).to(stream.hidden.dtype)
        return replace(stream, hidden=x, channels=channels)

    def new_state(self) -> list[list[BlockState]]:
        """Empty decoding states, of each block in each pass."""
        return [[block.new_state() for block in self.blocks] for _ in range(int(self.depth.passes(False).total))]

    def _settled(self, before: Tensor, after: Tensor) -> bool:
        """Whether a pass has changed the newest token's state by at most the tolerance, in each text."""
        if self.depth.tolerance is None:
            return False
        old, new = before[:, -1].double(), after[:, -1].double()
        return bool(((new - old).norm(dim=-1) <= self.depth.tolerance * new.norm(dim=-1)).all())
