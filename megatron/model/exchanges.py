"""What the layers send on other axes than tensor, in closed form, from what each kind declares.

A kind whose layers look beyond their own tokens says in a static method `exchanges(model, options, around)` what one
micro-batch sends, forward and backward, as a list of `LayerMessage`; `around` is the rank's place and its share of the
tokens. Layers that only compute token by token need none. Sizes are nccl-tests' S, as in accounts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.config import Config
from megatron.config.pattern import Kind
from megatron.config.recurrence import Passes, core_of
from megatron.config.sections.model import ModelSection
from megatron.config.variants import options_of
from megatron.parallel.account import group_name
from megatron.parallel.context import ContextGroup
from megatron.parallel.mesh import Mesh
from megatron.parallel.traffic import SIZES, SPLIT, Call, Messages

from .options import kind_of, layer_class
from .traffic import ONCE, NotPredicted

ALWAYS, UNLESS_KEPT, NEVER = "always", "unless kept", "never"


@dataclass(frozen=True)
class LayerMessage:
    """One message of a layer in each micro-batch.

    Attributes:
        axis: on which: a field of `Mesh`.
        operation: as in accounts; `send` and `recv` are between two ranks.
        elements: of nccl-tests' S.
        dtype: empty is the type in which layers compute.
        backward: it is sent in the backward pass.
        again: whether a recomputation sends it once more: always, unless selective recomputation keeps the result, or
            never.
        shared: a name of what all layers read; the first one asks for it, and with a pipeline that of each block.
        uneven: the data decide how much of it each rank sends; `elements` is the mean over the ranks of the group.
        training: it is sent in training alone, not where the layer is one of a teacher.
        split: an all-to-all whose caller gives the size of each rank's part; tables of algorithms leave it alone.
    """

    axis: str
    operation: str
    elements: int
    dtype: str = ""
    backward: bool = False
    again: str = ALWAYS
    shared: str = ""
    uneven: bool = False
    split: bool = False
    training: bool = False

    @property
    def kind(self) -> str:
        """Of `Messages.add`."""
        return SPLIT if self.split else ""


@dataclass(frozen=True)
class Around:
    """What a layer's messages depend on besides its options.

    Attributes:
        mesh: this rank's place.
        context: the ranks that share its sequences.
        samples: of a micro-batch.
        length: positions that this rank has of each.
        documents: whether documents are kept apart.
    """

    mesh: Mesh
    context: ContextGroup
    samples: int
    length: int
    documents: bool

    @property
    def tensor(self) -> int:
        """Tensor parallel ranks."""
        return self.mesh.layout.tensor


def from_before(around: Around, elements: int, by: int = 1, dtype: str = "") -> list[LayerMessage]:
    """`ContextGroup.from_before`: what the rank `by` ranks before has, and its gradient on the way back."""
    rank, ranks = around.context.rank, around.context.size
    if ranks == 1:
        return []
    sent, returned = (elements if there else 0 for there in (rank + by < ranks, rank >= by))
    return [
        LayerMessage("context", "all_to_all", sent, dtype, split=True),
        LayerMessage("context", "all_to_all", returned, dtype, backward=True, split=True),
    ]


def document_starts(around: Around) -> list[LayerMessage]:
    """What scanning layers ask the rank before of documents, once for all of them."""
    if around.context.size == 1 or not around.documents:
        return []
    return [LayerMessage("context", "all_to_all", from_before(around, around.samples)[0].elements, "int32",
                    again=NEVER, shared="document starts", split=True)]  # fmt: skip


def layer_traffic(config: Config, mesh: Mesh, layers: Sequence[int], core: Passes = ONCE) -> tuple[Messages, set[Call]]:
    """What one micro-batch sends on the context, data and expert axes, and which of these calls have bytes that are
    right only in the sum over all ranks.

    Args:
        config: resolved.
        mesh: of the rank.
        layers: places in the list [embedding, blocks..., head] that the rank holds.
        core: how often it goes through a recurrent core.

    Raises:
        NotPredicted: a kind does not say what it sends.
    """
    tally, uneven, model = Messages(), set(), config.model
    held = [place - 1 for place in layers if 0 < place <= len(model.blocks)]
    held += range(len(model.blocks), _count(model)) if len(model.blocks) + 1 in layers else ()
    for index, layer, message in _asked(config, mesh, held):
        often = core if index in core_of(model.blocks) and not message.shared else ONCE
        for call in _calls(config, mesh, layer, message, index):
            times = int(often.total if call.phase == "forward" else often.backward)
            tally.add(call, times, times * message.elements * SIZES[call.dtype], message.kind)
            uneven |= {call} if message.uneven else set()
    return tally, uneven


def reading_exchanges(config: Config, mesh: Mesh) -> tuple[Messages, set[Call]]:
    """As `layer_traffic`, of a model that is only asked for the input of its head, and whose layers no account names: a
    teacher.
    """
    tally, uneven, model = Messages(), set(), config.model
    for index, _, message in _asked(config, mesh, range(len(model.blocks))):
        if message.backward or message.training:
            continue
        times = model.recurrence.evaluation if index in core_of(model.blocks) and not message.shared else 1
        for call in _calls(config, mesh, "", message, index):
            if call.phase == "forward":
                tally.add(call, times, times * message.elements * SIZES[call.dtype], message.kind)
                uneven |= {call} if message.uneven else set()
    return tally, uneven


def _count(model: ModelSection) -> int:
    return len(model.blocks) + len(model.further_blocks)


def _asked(config: Config, mesh: Mesh, held: Iterable[int]) -> Iterator[tuple[int, str, LayerMessage]]:
    """(index of the block, layer, message) of blocks in one pass; what all layers read is asked for once."""
    training, model = config.training, config.model
    length = training.sequence_length // mesh.layout.context
    around = Around(mesh, ContextGroup.of(mesh), training.micro_batch_size, length, config.data.reset_attention_at_eod)
    asked: set[str] = set()
    for index in held:
        pattern, name = (*model.blocks, *model.further_blocks)[index], f"layers.{index}"
        if mesh.layout.pipeline > 1:  # there each block unpacks a stream of its own
            asked = set()
        parts = [(name, kind) for kind in pattern.side]
        parts += [(f"{name}.{kind.name}", kind) for kind in (*pattern.mixers, *([pattern.ffn] if pattern.ffn else []))]
        for layer, kind in parts:
            for message in _messages(config, kind, around):
                if message.shared and message.shared in asked:
                    continue
                asked.add(message.shared)
                if training.sequence_chunks > 1 and getattr(mesh, message.axis).size > 1:
                    raise NotPredicted("there is no formula for chunks of sequences on the context or expert axis")
                yield index, layer, message


def _messages(config: Config, kind: Kind, around: Around) -> Iterable[LayerMessage]:
    layer = layer_class(config.model, kind)
    if not hasattr(layer, "exchanges"):
        if around.context.size > 1 and kind_of(config.model, kind).context != "alone":
            raise NotPredicted(f"layers of kind {kind.name} do not say what they exchange (`exchanges`)")
        return ()
    found: Iterable[LayerMessage] = layer.exchanges(config.model, options_of(config.model, kind), around)
    return found


def _calls(config: Config, mesh: Mesh, layer: str, message: LayerMessage, index: int) -> Iterator[Call]:
    axis, recompute = getattr(mesh, message.axis), config.training.activation_checkpointing
    if axis.size == 1:
        return
    layout = mesh.layout
    line = layout.all_experts(mesh.at) if message.axis == "expert" else None
    name = group_name(list(map(layout.rank, line)), layout, mesh.at) if line else message.axis
    ranks = 2 if message.operation in ("send", "recv") else axis.size
    dtype = message.dtype or config.precision.compute
    phases = ["backward" if message.backward else "forward"]
    repeats = recompute.mode == "selective" or (recompute.mode == "full" and index % recompute.every == 0)
    if repeats and not message.backward and message.again != NEVER:
        kept = message.again == UNLESS_KEPT and recompute.mode == "selective"
        phases += [] if kept else ["recompute"]
    for phase in phases:
        yield Call(phase, layer, name, ranks, message.operation, dtype)
