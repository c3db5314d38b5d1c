"""Messages of layers on other axes than tensor, in closed form, from declarations of the kinds.

A kind whose layers read tokens of other ranks has a static method `exchanges(model, options, around)`. It gives the
messages of one micro-batch, forward and backward, as a list of `LayerMessage`. `around` is the rank's place and its
share of the tokens. Layers that compute token by token need none. Sizes are nccl-tests' S, as in accounts."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from megatron.config import Config
from megatron.config.arithmetic.recurrence import Passes, core_of
from megatron.config.pattern import Kind
from megatron.config.variants import options_of
from megatron.parallel.layers.context import ContextGroup
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.account import group_name
from megatron.parallel.messages.traffic import SIZES, SPLIT, Call, Messages

from ..options import kind_of, layer_class
from .traffic import ONCE, NotPredicted, stops_early

ALWAYS, UNLESS_KEPT, BEHIND, NEVER = "always", "unless kept", "behind", "never"
EACH, ALL_BUT_LAST, LAST = "each", "all but the last", "last"
MEAN, MOST, BY_DOCUMENTS = "mean", "most", "by documents"


@dataclass(frozen=True)
class LayerMessage:
    """One message of a layer in each micro-batch."""

    axis: str  # a field of `Mesh`
    operation: str  # as in accounts. `send` and `recv` are between two ranks.
    elements: int  # of nccl-tests' S
    dtype: str = ""  # empty is the type in which layers compute
    backward: bool = False  # it is sent in the backward pass.
    # Whether a recomputation sends it again: always, unless selective recomputation keeps the result, where the
    # backward pass needs a tensor after the layer's last product, or never
    again: str = ALWAYS
    # Name of a value that all layers read. The first layer asks for it, or with a pipeline the first of each block.
    shared: str = ""
    # How the data change it, empty where they do not. `MEAN`, `MOST`: each rank sends another number of elements, and
    # `elements` is the mean over the group or the maximum. `BY_DOCUMENTS`: it depends on documents. It is exact where
    # they are known, else the maximum.
    by_data: str = ""
    split: bool = False  # an all-to-all whose caller gives the size of each rank's part. Tables of algorithms skip it.
    training: bool = False  # it is sent only in training, not by a teacher
    chunks: str = EACH  # of a sequence in chunks, the chunks for which it is sent: each, all but the last, or the last

    @property
    def kind(self) -> str:
        """Of `Messages.add`."""
        return SPLIT if self.split else ""

    def times(self, chunks: int) -> int:
        """Number of messages for n chunks."""
        return {EACH: chunks, ALL_BUT_LAST: chunks - 1, LAST: 1}[self.chunks]


@dataclass(frozen=True)
class Around:
    """Facts for a layer's messages, in addition to its options."""

    mesh: Mesh  # this rank's place, as the layers see it (`Mesh.of_blocks`)
    context: ContextGroup  # the ranks that share its sequences
    samples: int  # of a micro-batch
    length: int  # positions of this rank in each sample, or in a chunk of it
    documents: bool  # whether documents are kept apart
    chunks: int = 1  # number of chunks of a sequence, which layers compute one after the other
    known: Tensor | None = None  # int [B, S], the documents of the micro-batch's whole samples, where known.
    # Values that several layers derive from these
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tensor(self) -> int:
        """Tensor parallel ranks, of one column."""
        return self.mesh.tensor.size

    def remember(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value made once under this key."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


def from_before(around: Around, elements: int, by: int = 1, dtype: str = "") -> list[LayerMessage]:
    """`ContextGroup.from_before`: a tensor of the rank `by` ranks before, and its gradient."""
    rank, ranks = around.context.rank, around.context.size
    if ranks == 1:
        return []
    sent, returned = (elements if there else 0 for there in (rank + by < ranks, rank >= by))
    return [
        LayerMessage("context", "all_to_all", sent, dtype, split=True),
        LayerMessage("context", "all_to_all", returned, dtype, backward=True, split=True),
    ]


def handed_on(around: Around, elements: int, dtype: str = "", *, gradient: bool = True) -> list[LayerMessage]:
    """`ContextGroup.to_first`: the state after a chunk from the last rank to the first, for the next chunk, and its
    gradient where it has one. The state after the last chunk is not read."""
    rank, ranks = around.context.rank, around.context.size
    if ranks == 1 or around.chunks == 1:
        return []
    sent, returned = (elements if here else 0 for here in (rank == ranks - 1, rank == 0))
    found = [LayerMessage("context", "all_to_all", sent, dtype, split=True)]
    if gradient:
        found.append(LayerMessage("context", "all_to_all", returned, dtype, backward=True, split=True,
                                  chunks=ALL_BUT_LAST))  # fmt: skip
    return found


def document_starts(around: Around) -> list[LayerMessage]:
    """Documents of the rank before for scanning layers, once for all of them."""
    if around.context.size == 1 or not around.documents:
        return []
    return [LayerMessage("context", "all_to_all", from_before(around, around.samples)[0].elements, "int32",
                    again=NEVER, shared="document starts", split=True)]  # fmt: skip


@dataclass
class ExchangeTraffic:
    """Messages of one micro-batch on the context, data and expert axes."""

    messages: Messages = field(default_factory=Messages)
    by_data: dict[Call, str] = field(default_factory=dict)  # of calls that data change. See `LayerMessage`.

    def add(self, call: Call, times: int, message: LayerMessage) -> None:
        """`message`, n times."""
        self.messages.add(call, times, times * message.elements * SIZES[call.dtype], message.kind)
        if message.by_data:
            self.by_data[call] = message.by_data


def layer_traffic(
    config: Config, mesh: Mesh, layers: Sequence[int], core: Passes = ONCE, documents: Tensor | None = None
) -> ExchangeTraffic:
    """Messages of the layers in one micro-batch.

    Args:
        config: resolved.
        mesh: of the rank.
        layers: places in the list [embedding, blocks..., head] that the rank holds.
        core: passes through a recurrent core.
        documents: int [B, S], of the micro-batch's whole samples. None where unknown.

    Raises:
        NotPredicted: a kind does not declare its messages.
    """
    found, model, mesh = ExchangeTraffic(), config.model, mesh.of_blocks
    held = [place - 1 for place in layers if 0 < place <= len(model.blocks)]
    blocks = len(model.blocks)
    held += range(blocks, blocks + len(model.further_blocks)) if blocks + 1 in layers else ()
    for index, layer, message in _asked(config, mesh, held, documents):
        often = core if index in core_of(model.blocks) and not message.shared else ONCE
        for call in _calls(config, mesh, layer, message, index):
            times = int(often.total if call.phase == "forward" else often.backward)
            found.add(call, times * message.times(config.training.sequence_chunks), message)
    return found


def reading_exchanges(config: Config, mesh: Mesh, documents: Tensor | None = None) -> ExchangeTraffic:
    """As `layer_traffic`, of a teacher, which gives only the input of its head and whose layers no account names."""
    found, model, mesh = ExchangeTraffic(), config.model, mesh.of_blocks
    for index, _, message in _asked(config, mesh, range(len(model.blocks)), documents):
        if message.backward or message.training:
            continue
        times = model.recurrence.evaluation if index in core_of(model.blocks) and not message.shared else 1
        for call in _calls(config, mesh, "", message, index):
            if call.phase == "forward":
                found.add(call, times * message.times(config.training.sequence_chunks), message)
    return found


def _asked(
    config: Config, mesh: Mesh, held: Iterable[int], known: Tensor | None
) -> Iterator[tuple[int, str, LayerMessage]]:
    """(index of the block, layer, message) of blocks in one pass. Shared messages come once."""
    training, model = config.training, config.model
    chunks, documents = training.sequence_chunks, config.data.reset_attention_at_eod
    length = training.sequence_length // mesh.layout.context // chunks
    around = Around(mesh, ContextGroup.of(mesh), training.micro_batch_size, length, documents, chunks, known)
    asked: set[str] = set()
    for index in held:
        pattern, name = (*model.blocks, *model.further_blocks)[index], f"layers.{index}"
        if mesh.layout.pipeline > 1 or chunks > 1:  # each block unpacks or cuts a stream of its own
            asked = set()
        parts = [(name, kind) for kind in pattern.side]
        parts += [(f"{name}.{kind.name}", kind) for kind in (*pattern.mixers, *([pattern.ffn] if pattern.ffn else []))]
        for layer, kind in parts:
            for message in _messages(config, kind, around):
                if message.shared and message.shared in asked:
                    continue
                asked.add(message.shared)
                if message.again == BEHIND:
                    skipped = kind is pattern.layers[-1] and stops_early(config.model, pattern)
                    message = replace(message, again=NEVER if skipped else ALWAYS)
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
    layout, line = mesh.layout, None
    if message.axis == "expert":
        line = layout.all_experts(mesh.at)
    elif layout.columns > 1 and message.axis in ("tensor", "columns"):
        line = layout.on_grid(mesh.at)[message.axis == "columns"]
    name = group_name(list(map(layout.rank, line)), layout, mesh.at) if line else message.axis
    ranks = 2 if message.operation in ("send", "recv") else axis.size
    dtype = message.dtype or config.precision.compute
    phases = ["backward" if message.backward else "forward"]
    repeats = recompute.mode == "selective" or (recompute.mode == "full" and index % recompute.every == 0)
    repeats |= config.training.sequence_chunks > 1
    if repeats and not message.backward and message.again != NEVER:
        kept = message.again == UNLESS_KEPT and recompute.mode == "selective"
        phases += [] if kept else ["recompute"]
    for phase in phases:
        yield Call(phase, layer, name, ranks, message.operation, dtype)
