"""A model of transformers as a whole model of a run: its class computes the head's input, and our head the loss."""

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from megatron.model.embedding_and_head import Head, Reader, Taught
from megatron.model.multi_token import FurtherLabels
from megatron.model.partition import stage_bounds
from megatron.model.stack import ModelPlan
from megatron.model.stream import LOSS, Stream
from megatron.objectives.named import objective_of
from megatron.parallel.layers.collectives import enter
from megatron.parallel.layers.cross_entropy import linear_cross_entropy
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.mesh import ALONE, Axis
from megatron.parallel.layout.random import site_key
from megatron.parallel.layout.shard import LogicalTensor, Role
from megatron.worker.place import StartError

from .build import hf_model, mark
from .check import CLOSE, Uncut, stages_of, tokens_of, weights_of
from .cut import WHOLE_WITH_SUM, Cuts, cut, cuts_of, one, partial_gradient
from .facts import FactsError
from .outline import ANY, Stages, Window, gathered_whole, linears_of
from .probe import Form, angles_of, arguments_of, keeps_apart, output_of, positions_of, probe, same


class Taken(nn.Module):
    """In the place of the output layer: keeps its input [B, S, H], and computes no logits.

    Args:
        dtype: of the layer's weight, which some classes read.
    """

    seen: Tensor | None = None

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight, self.bias = torch.empty(0, dtype=dtype, device=device), None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return x

    def take(self) -> Tensor:
        """The input, once: it belongs to a graph that must not outlive its step."""
        seen, self.seen = self.seen, None
        assert seen is not None  # of the pass that has just ended
        return seen


class OutputHead(Head):
    """Our head with the output layer of another class, whose last norm has been applied.

    Args:
        layer: its weight may be the token embedding.
    """

    def __init__(self, plan: ModelPlan, layer: nn.Module, form: Form) -> None:
        config, weight = plan.config, cast(nn.Parameter, layer.weight)
        objective = objective_of(config)
        identity: Any = nn.Identity()
        super().__init__(
            plan.factory(""), config.model, config.training, plan.init, objective, identity, weight, plan.chunks
        )
        self.bias = getattr(layer, "bias", None)
        self.options = replace(self.options, multiplier=form.multiplier, softcap=form.softcap)


@dataclass
class Text:
    """Decoding state.

    Attributes:
        rows: int64 [B, S], the tokens so far. `None` before the first pass.
        memory: what the class returned to read further tokens with, if it can.
    """

    rows: Any = None
    memory: Any = None


MEMORIES = ("past_key_values", "cache_params", "state", "mems")  # arguments of classes, and names in their outputs


class WholeModel(nn.Module):
    """The interface of `model.stack.Model` around a class of transformers.

    Args:
        on_host: parameters stay on the host. ZeRO 3 brings them to the device one after another.
        window: the blocks of a pipeline stage. None: all. Only the stage of the last one has a head.
    """

    core = None
    blocks: tuple[nn.Module, ...] = ()  # its layers have no common form

    head: OutputHead
    memory: str | None = None  # see `_memory`. None: not tried
    shared: frozenset[str] = frozenset()  # whole layers with a part of the gradient on each tensor rank

    def __init__(self, plan: ModelPlan, on_host: bool = False, window: Window | None = None) -> None:
        super().__init__()
        self.plan, self.form, self.window = plan, plan.form, window
        same = plan.mesh.replicas if on_host else ALONE
        inner, form, stages = self._made(same)
        layer = output_of(inner)
        if same.rank:
            _without_memory(inner)
        self.longest, self.angles = positions_of(inner), angles_of(inner)
        self.arguments, self.balance = arguments_of(inner), _factor_of_routers(inner)
        wide = (*(inner._keep_in_fp32_modules or ()), *(inner._keep_in_fp32_modules_strict or ()))
        cuts = None if plan.mesh.tensor.size == 1 else cuts_of(inner)
        mark(inner, layer, wide, cuts.shards if cuts else {})
        self.adaptable = frozenset(linears_of(inner))
        self.blocks_name = stages.name if stages else ""
        replaced = stages.install(window) if stages and window else []
        self.stand_ins = [(module, name, logical_of(parameter).keep_fp32) for module, name, parameter in replaced]
        self.taken = Taken(plan.factory("").dtype, plan.device)
        self.output = (
            layer,
            [(parent, name) for parent in inner.modules() for name, child in parent.named_children() if child is layer],
        )  # no module: its weight belongs to the head
        for parent, name in self.output[1]:
            setattr(parent, name, self.taken)
        if plan.config.training.activation_checkpointing.mode == "full":
            recompute(inner, stages)
        # In a tuple, not a list of modules: they are parts of `inner`.
        self.gathered_whole = tuple(gathered_whole(inner)) if on_host else ()
        self.inner = inner
        sliced = cuts if torch.device(plan.device).type != "meta" else None
        uncut = self._cut(sliced, layer, form, not same.rank) if sliced else None
        if window is None or window.last:
            self.head = OutputHead(plan, layer, form)
        if sliced:
            self._compare(uncut, same)
        self._place("cpu" if on_host else plan.device, same)

    def _made(self, same: Axis) -> tuple[PreTrainedModel, Form, Stages | None]:
        """The class, how its logits follow from the head's input, and its pipeline stages, all checked.

        Raises:
            StartError: it cannot be trained.
        """
        plan, stages, form = self.plan, None, Form()
        own, seed = plan.config.model.blocks[0].kinds[0].name, plan.config.training.seed
        meta, problem = torch.device(plan.device).type == "meta", None
        try:
            with torch.device("meta" if meta or same.rank else "cpu"):
                inner = hf_model(getattr(plan.config.model, own).model_dump(), seed, plan.values and not same.rank)
            if not meta and not same.rank:
                form = probe(inner)
                if self.form.documents and not keeps_apart(inner):
                    rule = f"must be false: {type(inner).__name__} reads across the ends of documents"
                    raise FactsError("data.reset_attention_at_eod", rule, "remove it")
                if self.window is not None:
                    stages = stages_of(inner, runs_of_blocks(plan))
        except FactsError as error:
            problem = error
        first = _of_first(problem or form, same)
        problem = problem or (first if isinstance(first, FactsError) else None)
        if problem is not None:
            key = f"model.{own}{problem.key}" if problem.key.startswith(".") else problem.key
            raise StartError(f"{key}: {problem}") from problem
        return inner, first, stages

    def _compare(self, uncut: Uncut | None, same: Axis) -> None:
        """Check that the slices are the class. They are in fp32 for this. Gradients of whole parameters that each rank
        has a part of are summed from now on.

        Args:
            uncut: of the first of these ranks.

        Raises:
            StartError: they are not, on all of them.
        """
        axis, found = self.plan.mesh.tensor, list[str]()
        if uncut is not None:
            self._place(self.plan.device, ALONE, torch.float32)
            own_type, self.taken.weight = self.taken.weight.dtype, self.taken.weight.float()
            try:
                found = uncut.compare(self._costs if self.window is None or self.window.last else None, axis)
            except FactsError as error:
                found = [f"{error.key}: {error}", ""]
            self.taken.weight = self.taken.weight.to(own_type)
        found = _of_first(found, same)
        if found[-1:] == [""]:
            raise StartError(found[0])
        for name in found:
            partial_gradient(self.inner.get_parameter(name), axis)
        self.shared |= {name.rpartition(".")[0] for name in found}

    def _costs(self, x_BSH: Tensor) -> Tensor:
        """A sum of costs of tokens, by our head."""
        tokens, head = tokens_of(self.plan.config.model.vocab_size).flatten().to(x_BSH.device), self.head
        return linear_cross_entropy(
            enter(x_BSH, self.plan.mesh).flatten(0, 1),
            head.matrix,
            head.bias,
            tokens,
            weights_of(tokens),
            first=head.span.start,
            axis=self.plan.mesh.tensor,
            options=replace(head.options, z_loss=0.0, compiled=False, cost=None),
        )[0]

    def _cut(self, cuts: Cuts, layer: nn.Module, form: Form, values: bool) -> Uncut | None:
        """Keep this rank's part of the class. Returns the results of the whole, if it has values."""
        plan, inner, window = self.plan, self.inner, self.window
        tokens, later = tokens_of(plan.config.model.vocab_size), window is not None and window.start > 0
        given = torch.sin(torch.arange(tokens.numel() * plan.config.model.hidden_size)).view(*tokens.shape, -1)

        def run() -> Tensor:
            device = next(inner.parameters()).device

            def call() -> Tensor:
                read = torch.full_like(tokens, ANY) if later else tokens
                inner(input_ids=read.to(device), **self.arguments)
                return self.taken.take()

            return call() if window is None else window.through(call, given.to(device) if later else None)

        def costs(x_BSH: Tensor) -> Tensor:
            logits = form.of(nn.functional.linear(x_BSH, cast(Tensor, layer.weight), getattr(layer, "bias", None)))
            own = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
            return (weights_of(own) * own).sum()

        uncut = Uncut(inner, run, costs if window is None or window.last else None) if values else None
        cut(inner, layer, cuts, lambda name: replace(plan.factory(name), device="meta"))
        self.shared = frozenset(name for name, style in cuts.styles.items() if style == WHOLE_WITH_SUM)
        return uncut

    def _place(self, device: torch.device | str, same: Axis, own: torch.dtype | None = None) -> None:
        """Give parameters their types, put them onto this device, and buffers onto the plan's.

        Args:
            same: ranks with the same parameters. Only the first has values.
            own: type of all, for a comparison.
        """
        plan = self.plan
        for parameter in dict.fromkeys(self.parameters()):
            dtype = torch.float32 if logical_of(parameter).keep_fp32 else own or plan.factory("").dtype
            parameter.data = parameter.data.to(device, dtype) if not same.rank else one(parameter.shape, dtype)
        for module, name, wide in self.stand_ins:
            dtype, shape = torch.float32 if wide else own or plan.factory("").dtype, getattr(module, name).shape
            setattr(module, name, torch.zeros((), dtype=dtype, device=plan.device).expand(shape))
        for module in self.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = _shared(buffer, plan.device, same)
        for name, buffer in self.inner.named_buffers():
            if self.window and self.window.start and not name.startswith(f"{self.blocks_name}."):
                continue  # the first stage has it
            kept = name.rsplit(".", 1)
            parent = self.inner.get_submodule(kept[0]) if len(kept) > 1 else self.inner
            if buffer.dtype == torch.float32 and kept[-1] not in parent._non_persistent_buffers_set:
                marks: Any = buffer
                marks.logical = LogicalTensor(name, tuple(buffer.shape), Role.STATE, keep_fp32=True)

    @contextmanager
    def _draws(self, samples: Tensor | None) -> Iterator[None]:
        """Dropout of the class draws from torch's generator, here by the first sample of the micro-batch."""
        if samples is None or not self.training:
            yield
            return
        devices = [samples.device] if samples.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            stage = ("stage", self.window.start) if self.window and self.window.start else ()
            torch.manual_seed(site_key(self.plan.config.training.seed, "dropout", int(samples[0]), *stage))
            yield

    def stream(
        self,
        tokens_BS: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Stream:
        """The input of the head, with the loss of routers that the class returns."""
        more = {"position_ids": positions.long()} if self.form.documents and positions is not None else {}
        with self._draws(samples):
            output = self.inner(input_ids=tokens_BS, **self.arguments, **more)
        stream, balance = Stream(self.taken.take(), samples=samples), getattr(output, "aux_loss", None)
        if isinstance(balance, Tensor) and self.balance and self.training:
            stream = stream.with_channels({LOSS: self.balance * balance})
        return stream

    def part(self, tokens_BS: Tensor | None, stream: Stream | None, given: Mapping[str, Tensor]) -> Stream:
        """The stream after this stage's blocks, or in the last stage the input of the head.

        Args:
            tokens_BS: None: the stage has a stream before it.
            given: side channels of the stream.
        """
        x = None if stream is None else stream.hidden
        if tokens_BS is None:
            assert x is not None
            tokens_BS = torch.full(x.shape[:2], ANY, device=x.device)
        positions, samples, window = given.get("positions"), given.get("samples"), self.window
        assert window is not None
        more = {"position_ids": positions.long()} if self.form.documents and positions is not None else {}

        def call() -> Tensor:
            self.inner(input_ids=tokens_BS, **self.arguments, **more)
            return self.taken.take()

        with self._draws(samples):
            y = window.through(call, x).to(self.plan.stream_dtype)
        return Stream(y, positions, given.get("documents"), samples)

    @staticmethod
    def stage() -> type[nn.Module]:
        """The class of the layers of a pipeline stage before the head."""
        return StageOfWhole

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
        reader: Reader | None = None,
        further: FurtherLabels | None = None,
        teacher: Taught | None = None,
        columns: Mapping[str, Tensor] | None = None,
        state: list[Any] | None = None,
        begin: int = 0,
    ) -> Any:
        """As `Model.forward`."""
        if state is None:
            stream = self.stream(tokens_BS, positions, documents, samples)
        else:
            stream = self._continued(tokens_BS, *state)
        return self.head(stream, labels_BS, weights_BS, reader, further, teacher, columns)

    def _continued(self, tokens_BS: Tensor, text: Text) -> Stream:
        """The stream of tokens that follow those in `text`, which grows by them."""
        before = 0 if text.rows is None else text.rows.shape[1]
        text.rows = tokens_BS if text.rows is None else torch.cat([text.rows, tokens_BS], 1)
        once, each_token = self.angles
        if not self.memory:
            stream = self.stream(text.rows)
            return stream.with_hidden(stream.hidden[:, -tokens_BS.shape[1] :])
        found, pieces = [], tokens_BS.split(1, 1)  # all recurrences take one token
        if before <= once < text.rows.shape[1] or text.rows.shape[1] > each_token:
            text.memory = None  # its keys have the angles of a shorter text
        if text.memory is None:
            pieces = (text.rows,)
        for each in pieces:
            more = {} if text.memory is None else {self.memory: text.memory}
            output = self.inner(input_ids=each, **{**self.arguments, "use_cache": True, **more})
            text.memory = getattr(output, self.memory)
            found.append(self.taken.take())
        return Stream(torch.cat(found, 1)[:, -tokens_BS.shape[1] :])

    @torch.no_grad()
    def _memory(self) -> str:
        """The argument that continues a text. "": there is none, or a text in pieces has another result."""
        tokens, was_training = tokens_of(self.plan.config.model.vocab_size).to(self.plan.device), self.training
        known, dtype = inspect.signature(self.inner.forward).parameters, self.taken.weight.dtype
        self.eval()
        whole = self.stream(tokens).hidden
        for self.memory in (each for each in MEMORIES if each in known):
            text = Text()
            try:
                found = torch.cat([self._continued(each, text).hidden for each in tokens.split([5, 1, 2], 1)], 1)
                if same(found, whole, CLOSE if dtype == torch.float32 else 4 * torch.finfo(dtype).eps):
                    break
            except Exception:  # a class may raise anything
                continue
        else:
            self.memory = ""
        self.train(was_training)
        return self.memory

    def logits(self, tokens_BS: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """fp32 logits [B, S, V]."""
        return self.head.logits(self.stream(tokens_BS, positions))

    def linears(self) -> dict[str, nn.Module]:
        """The linear layers of this rank's blocks that may have adapters, by name. Recomputed blocks then need an input
        with a gradient."""
        if self.plan.config.training.activation_checkpointing.mode == "full":
            self.inner.enable_input_require_grads()
        return {name: each for name, each in self.inner.named_modules() if name in self.adaptable}

    def as_saved(self, dtype: torch.dtype) -> PreTrainedModel:
        """The class with its output layer in place, for `save_pretrained`. This object cannot compute afterwards."""
        for parent, name in self.output[1]:
            setattr(parent, name, self.output[0])
        for parameter in self.inner.parameters():
            if not logical_of(parameter).keep_fp32:
                parameter.data = parameter.data.to(dtype)
        self.inner.config.dtype = dtype
        return self.inner

    def new_state(self, axis: Axis = ALONE) -> list[Any]:
        """An empty text. Ranks that share a text all read it."""
        self.memory = self._memory() if self.memory is None else self.memory
        return [Text()]

    def decode(self, tokens_BS: Tensor, state: list[Any], begin: int, last: bool = False) -> Tensor:
        """Logits [B, S, V] of tokens that follow the `begin` tokens in `state`, which grows by them.

        Args:
            last: only the logits of the last token, [B, 1, V].
        """
        stream = self._continued(tokens_BS, *state)
        return self.head.logits(stream.with_hidden(stream.hidden[:, -1:]) if last else stream)


class StageOfWhole(nn.Module):
    """(tokens, then side channels) or a packed stream, to a packed stream."""

    def __init__(self, plan: ModelPlan, places: range, shared: dict[str, nn.Module]) -> None:
        """`places` in the list [embedding, blocks..., head]. `shared` gets the head, if the stage has it."""
        super().__init__()
        count = len(plan.blocks)
        window = Window(max(places.start - 1, 0), min(places.stop - 1, count), count)
        self.model, self.form = WholeModel(plan, window=window), plan.form
        if window.last:
            shared["head"] = self.model.head

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tensors = (tensors,) if isinstance(tensors, Tensor) else tensors
        form, window = self.form, self.model.window
        later = window is not None and window.start > 0
        tokens, stream = (None, form.unpack(tensors)) if later else (tensors[0], None)
        return form.pack(self.model.part(tokens, stream, form.name(tensors[1:])))


def runs_of_blocks(plan: ModelPlan) -> list[tuple[int, int]]:
    """(first, last + 1) of each pipeline stage's blocks."""
    bounds = stage_bounds(plan.config)
    return [(max(a - 1, 0), min(b - 1, len(plan.blocks))) for a, b in itertools.pairwise(bounds)]


def recompute(model: PreTrainedModel, stages: Stages | None) -> None:
    """Have the class compute its blocks again in the backward pass.

    Raises:
        StartError: it cannot.
    """
    key = "training.activation_checkpointing.mode"
    if not model.supports_gradient_checkpointing:
        raise StartError(f"{key} must be none: {type(model).__name__} cannot recompute")
    if stages and not all(isinstance(each, GradientCheckpointingLayer) for each in stages.blocks):
        raise StartError(f"{key} must be none: {type(model).__name__} cannot recompute in pipeline stages")
    model.gradient_checkpointing_enable({"use_reentrant": True})  # ZeRO 3 changes the sizes of saved weights


def _factor_of_routers(model: PreTrainedModel) -> float:
    """Factor of the loss of routers, which the class multiplies only where it has labels. 0: it has none."""
    places = (model, model.config.get_text_config())
    found = (getattr(at, name, None) for at in places for name in ("router_aux_loss_coef", "aux_loss_coef"))
    return next((float(each) for each in found if each is not None), 0.0)


def _without_memory(model: nn.Module) -> None:
    """Replace parameters without values by ones on the host, which can later be given values."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = nn.Parameter(one(parameter.shape, parameter.dtype), parameter.requires_grad)
                module._parameters[name] = made.setdefault(parameter, new)


def _of_first(value: Any, same: Axis) -> Any:
    values = [value]
    if same.size > 1:
        dist.broadcast_object_list(values, same.ranks[0], group=same.group)
    return values[0]


def _shared(buffer: Tensor, device: torch.device | str, same: Axis) -> Tensor:
    """A buffer on the device, with the values of the first of these ranks."""
    made = torch.empty(buffer.shape, dtype=buffer.dtype, device=device) if same.rank else buffer.to(device)
    if same.size > 1:
        made = made.contiguous()
        real = torch.view_as_real(made) if made.is_complex() else made
        dist.broadcast(real.reshape(-1).view(torch.uint8), same.ranks[0], group=same.group)
    return made
