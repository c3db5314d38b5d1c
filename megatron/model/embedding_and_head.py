"""The two ends of the stack: tokens to a stream, and a stream to a loss or to logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.sections.model import ModelSection, NormOptions
from megatron.config.sections.recipe import TrainingSection
from megatron.objectives.contract import Objective
from megatron.parallel.layers.collectives import all_reduce, enter, gather_channels, gather_rows, sum_gradient
from megatron.parallel.layers.cross_entropy import LossOptions, OwnLoss, linear_cross_entropy, logits_of
from megatron.parallel.layers.label_costs import LabelsLoss, token_scores
from megatron.parallel.layers.linear import VocabEmbedding, sequence_slice
from megatron.parallel.layers.objective_logits import LogitsLoss, SoftLabels
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.initial import ZEROS, Init
from megatron.parallel.layout.precision import at_least_fp32, numbers_on
from megatron.parallel.layout.shard import Role, Shard

from .block import block_counts
from .chunks import WHOLE, Chunks, recomputed_call
from .counts import Counts
from .initialisation import Initialisation
from .multi_token import FurtherLabels, MultiTokenPrediction, further_labels
from .norm import Norm, norm_activations, norm_parameters
from .residual import ChannelScale, Dropout
from .stream import LOSS, TOKENS, Chunk, Stream, token_digits


class Positions(nn.Module):
    """A learned table of absolute positions. It is a module, since ZeRO 3 gathers by modules that return tensors."""

    def __init__(self, make: ParameterFactory, model: ModelSection, init: Initialisation):
        super().__init__()
        self.mesh, rows = make.mesh, model.embedding.max_positions
        self.weight = make.parameter(
            "weight", (rows, model.hidden_size), role=Role.POSITION, init=init.embedding(rows), stream=1
        )

    def forward(self, tokens_BS: Tensor, positions: Tensor | None, begin: int) -> Tensor:
        """Rows [1 or B, s, H] of the table for this rank's positions."""
        if positions is None:
            positions = torch.arange(begin, begin + tokens_BS.shape[1], device=tokens_BS.device).unsqueeze(0)
        table = sum_gradient(self.weight, self.mesh.tensor) if self.mesh.layout.sequence else self.weight
        return nn.functional.embedding(sequence_slice(positions, self.mesh), table)


def token_embedding(
    make: ParameterFactory, model: ModelSection, init: Initialisation, weight: nn.Parameter | None = None
) -> VocabEmbedding:
    """The table of all tokens' vectors, or a second use of the table with this `weight`."""
    vocabulary = model.vocab_size
    start = init.embedding(vocabulary)
    return VocabEmbedding(make.scope("tokens"), vocabulary, model.hidden_size, init=start, weight=weight)


class Embedding(nn.Module):
    """Tokens int [B, S] to a stream, which also has the embedding in `channels`."""

    def __init__(
        self, make: ParameterFactory, model: ModelSection, init: Initialisation, channels: tuple[str, ...] = ()
    ):
        super().__init__()
        self.mesh, self.multiplier, self.channels = make.mesh, model.embedding.multiplier, channels
        self.wide = model.residual.fp32
        self.tokens = token_embedding(make, model, init)
        self.positions = self.norm = self.scale = None
        if model.embedding.position == "learned":
            self.positions = Positions(make.of_stream.scope("positions"), model, init)
        if model.embedding.norm:
            own = make.of_stream.scope("norm")
            self.norm = Norm(own, model.hidden_size, model.norm, partial=make.mesh.layout.sequence)
        if model.residual.channel_scales:
            self.scale = ChannelScale(make.of_stream, model.hidden_size)
        self.dropout = Dropout(make, model, "embedding") if model.dropout > 0.0 else None

    def forward(
        self,
        tokens_BS: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
        begin: int = 0,
        chunk: Chunk | None = None,
    ) -> Stream:
        """`begin` is the position of the first token where positions are not given (decoding, and chunks)."""
        x = self.tokens(tokens_BS)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.positions is not None:
            x = x + self.positions(tokens_BS, positions, begin)
        if self.norm is not None:
            x = self.norm(x)
        if self.wide:
            x = at_least_fp32(x)
        if self.scale is not None:
            x = self.scale(x)
        stream = Stream(x, positions, documents, samples, chunk=chunk)
        if self.dropout is not None:
            x = self.dropout(x, stream)
        return stream.with_hidden(x).with_channels({
            name: token_digits(tokens_BS, x) if name == TOKENS else x for name in self.channels
        })


# A function of a head and its input [B, S, H] (whole on every tensor and context parallel rank), in place of the loss.
Reader = Callable[["Head", Tensor], Any]


@dataclass(frozen=True)
class LogitsAt:
    """A `Reader` of the logits [N, V] in these rows of a batch of one token each."""

    rows: Sequence[int]

    def __call__(self, head: Head, x_T1H: Tensor) -> Tensor:
        return head.logits_at(x_T1H[numbers_on(x_T1H.device, self.rows), 0])


class Head(nn.Module):
    """Final norm, logits and loss. With tied embeddings `weight` is the embedding's parameter.

    Args:
        further: modules that predict further tokens. In training their losses are added.

    Raises:
        ValueError: there are such modules and a teacher.
    """

    def __init__(
        self,
        make: ParameterFactory,
        model: ModelSection,
        training: TrainingSection,
        init: Initialisation,
        objective: Objective,
        norm: Norm,
        tied: nn.Parameter | None = None,
        chunks: Chunks = WHOLE,
        further: MultiTokenPrediction | None = None,
    ):
        super().__init__()
        self.mesh, self.chunks, self.further = make.mesh, chunks, further
        self.context = replace(make.context, chunk=chunks.tokens)
        multiplier = model.head.multiplier * init.factors.head
        on_gpu = torch.device(make.device).type == "cuda"
        compiled = training.compile != "off" and on_gpu
        chunk = training.tokens_of_loss(model.vocab_size, on_gpu)
        cost = objective.cost if objective.costs else None
        self.options = LossOptions(multiplier, model.head.softcap, training.z_loss, chunk, compiled, cost)
        self.teaching = objective.teacher
        if self.teaching is not None and further is not None:
            raise ValueError("a teacher has no costs of further tokens")
        self.norm = norm
        self.vocabulary, shape = model.vocab_size, (model.vocab_size, model.hidden_size)
        head, self.rows = make.scope("head"), make.row_axis(model.vocab_size, table=True)
        self.value: nn.Parameter | None = None
        if objective.scores:
            size = model.hidden_size
            reward = replace(make.scope("reward"), values=True)  # a language model's checkpoint has none
            start = Init("normal", (size + 1) ** -0.5)
            self.value = reward.parameter("weight", (1, size), role=Role.HEAD, init=start)
        elif tied is None:
            start = init.head(model.vocab_size)
            tied = head.parameter("weight", shape, role=Role.HEAD, init=start, shard=Shard(0), rows=self.rows)
        self.weight = None if objective.scores else tied
        self.bias = None
        if model.head.bias and not objective.scores:
            self.bias = head.parameter("bias", shape[:1], role=Role.BIAS, init=ZEROS, shard=Shard(0))
        (self.span,) = Shard(0).spans(model.vocab_size, self.mesh.tensor.rank, self.mesh.tensor.size)
        self.of_labels: LabelsLoss | None = None
        if objective.reads_labels:
            self.of_labels = LabelsLoss(objective.cost_of_labels, objective.sequences, objective.reports)
            if training.z_loss or chunks.tokens or further is not None:
                raise ValueError("costs of whole sequences have no z-loss, chunks of sequences or further tokens")
        self.of_logits: LogitsLoss | None = None
        if objective.reads_logits:
            self.of_logits = LogitsLoss(objective.cost_of_logits, model.vocab_size, self.span.start)

    @property
    def matrix(self) -> Tensor:
        """This tensor parallel rank's rows [V/t, H] of the head, gathered from the ranks that share them."""
        if self.weight is None:
            raise ValueError("a reward model has no logits: it scores answers (deepy reward)")
        return gather_rows(self.weight, self.rows)

    def normed(self, x: Tensor) -> Tensor:
        """The stream's norm, with all channels on every column of ranks."""
        return gather_channels(self.norm(x), self.mesh.columns)

    def forward(
        self,
        stream: Stream,
        labels_BS: Tensor,
        weights_BS: Tensor,
        reader: Reader | None = None,
        further: FurtherLabels | None = None,
        teacher: Taught | None = None,
        columns: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """(weighted sum of token losses and auxiliary losses, each token's cross-entropy [B, S] in nats).

        With a `teacher` also each token's divergence from it [B, S]. With a `reader`, its result. It is called here
        because ZeRO 3 gathers a module's weights only while the module runs.

        Args:
            further: labels of modules that predict further tokens. By default they follow from the labels, which must
                then be of whole samples.
            columns: numbers of each label [B, S] from the data, by name, for an objective that reads them.

        Raises:
            RuntimeError: the objective has a teacher, and a training step none.
        """
        if reader is not None:
            return reader(self, self.context.gather(self.read(stream)))
        if teacher is None and self.teaching is not None and torch.is_grad_enabled() and self.training:
            raise RuntimeError("the objective has a teacher, and this model got none")
        if self.further is not None and self.training:
            if further is None and self.context.size > 1:
                raise ValueError("labels of further tokens are made of whole samples, and this rank has a part of them")
            if further is None:
                further = further_labels(labels_BS, weights_BS, stream.documents, len(self.further.tokens))
            loss, *of_tokens, stream = self._further_loss(self.further, stream, labels_BS, weights_BS, further)
        elif self.of_labels is not None and self.value is not None:
            loss, *of_tokens = self._of_values(self.of_labels, stream.hidden, weights_BS, columns or {})
        elif self.of_labels is not None and (self.training or torch.is_grad_enabled()):
            loss, *of_tokens = self._in_two_passes(self.of_labels, stream.hidden, labels_BS, weights_BS, columns or {})
        else:
            loss, *of_tokens = self._in_chunks(stream.hidden, labels_BS, weights_BS, teacher)
        if LOSS in stream.channels:
            loss = loss + at_least_fp32(stream.channels[LOSS]).mean()
        return loss, *of_tokens

    def _in_chunks(
        self, x_BsH: Tensor, labels_BS: Tensor, weights_BS: Tensor, teacher: Taught | None
    ) -> tuple[Tensor, ...]:
        """`_loss` of each chunk, where the sequence is cut."""
        given, loss_of = [x_BsH, labels_BS, weights_BS], self._loss
        if teacher is not None:
            given, loss_of = [*given, teacher.x_BSH], partial(self._loss, teacher=(teacher.head, teacher.head.matrix))
        if not self.chunks.tokens:
            return loss_of(*given)
        # Rows that ranks share are gathered once for all chunks. ZeRO 3 gathers the weights that a chunk reads itself.
        if self.rows.size > 1:
            loss_of = partial(loss_of, matrix=self.matrix)
        losses, *pieces = zip(*(recomputed_call(loss_of, *each) for each in self._parts(*given)))
        return sum(losses), *(torch.cat(each, 1) for each in pieces)

    def _in_two_passes(
        self, objective: LabelsLoss, x_BsH: Tensor, labels_BS: Tensor, weights_BS: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`_loss`, where weights follow from the labels' log-probabilities."""
        normed_BsH, matrix = self.normed(x_BsH), self.matrix
        with torch.no_grad():
            _, ce_BS = self._cross_entropy(normed_BsH, labels_BS, weights_BS, matrix)
        signed_BS, loss = objective.weights(ce_BS, weights_BS, columns, self.context.axis)
        total, ce_BS = self._cross_entropy(normed_BsH, labels_BS, signed_BS, matrix)
        return total - total.detach() + loss.to(total.dtype), ce_BS

    def _of_values(
        self, objective: LabelsLoss, x_BsH: Tensor, weights_BS: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(weighted sum of the costs of values, each cost [B, S]).

        All t tensor parallel ranks compute it, and each has a share of 1/t in the gradient. The head's input and its
        weight sum up the shares.

        Raises:
            ValueError: the batch is not one of pairs.
        """
        if not columns:
            raise ValueError("a reward model has a loss of pairs only: it scores answers (deepy reward)")
        values_BS, before = self.values_at(enter(self.normed(x_BsH), self.mesh)), objective.sums
        signed_BS, loss = objective.weights(-values_BS.detach(), weights_BS, columns, self.context.axis)
        if not self.training:
            objective.sums = before
        assert objective.costs_BS is not None
        total = -(signed_BS * values_BS).sum() / self.mesh.tensor.size
        return total - total.detach() + loss.to(total.dtype), objective.costs_BS

    def values_at(self, x_BSH: Tensor) -> Tensor:
        """The scalar of each token [B, S] in at least fp32, from the head's input.

        Raises:
            ValueError: the model is no reward model.
        """
        if self.value is None:
            raise ValueError("the model must be a reward model: objective.type=reward_model trains one")
        return at_least_fp32(x_BSH) @ at_least_fp32(sum_gradient(self.value, self.mesh.tensor))[0]

    def _further_loss(
        self, parts: MultiTokenPrediction, stream: Stream, labels_BS: Tensor, weights_BS: Tensor, further: FurtherLabels
    ) -> tuple[Tensor, Tensor, Stream]:
        """(weighted sum of the losses of the next and of further tokens, cross-entropies [B, S] of the next token, the
        stream after the last module). All go through the head together, so that its gradient is computed once."""
        x = self.normed(stream.hidden)
        later, stream = parts(x, stream, labels_BS, further)
        loss, ce = self._cross_entropy(
            torch.cat([x, *later]),
            torch.cat([labels_BS, *further.labels]),
            torch.cat([weights_BS, *(parts.weight * further.weights)]),
        )
        ce_BS, ce_KBS = ce[: len(labels_BS)], ce[len(labels_BS) :].view_as(further.labels)
        parts.add(ce_KBS, further.weights)
        return loss, ce_BS, stream

    def _loss(
        self,
        x_BsH: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor,
        taught_BSH: Tensor | None = None,
        *,
        teacher: tuple[Head, Tensor] | None = None,
        matrix: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """(weighted sum of token losses, each token's cross-entropy [B, S], with a teacher its divergence [B, S]).

        Args:
            taught_BSH: input of the teacher's head.
            teacher: its head, and the head's matrix.
            matrix: `self.matrix`, if it was gathered before.
        """
        soft: OwnLoss | None = None
        if taught_BSH is not None and teacher is not None and self.teaching is not None:
            head, rows = teacher
            how = self.teaching
            soft = SoftLabels(taught_BSH.flatten(0, 1), rows, head.bias, head.options, how.share, how.temperature)
        return self._cross_entropy(self.normed(x_BsH), labels_BS, weights_BS, matrix, soft)

    def _cross_entropy(
        self,
        normed_BsH: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor,
        matrix: Tensor | None = None,
        loss: OwnLoss | None = None,
    ) -> tuple[Tensor, ...]:
        x_BSH = enter(normed_BsH, self.mesh)
        if loss is None and (self.training or torch.is_grad_enabled()):
            loss = self.of_logits
        total, *of_labels = linear_cross_entropy(
            x_BSH.flatten(0, 1),
            self.matrix if matrix is None else matrix,
            self.bias,
            labels_BS.flatten(),
            weights_BS.flatten(),
            loss,
            first=self.span.start,
            axis=self.mesh.tensor,
            options=self.options,
        )
        return total, *(each.view_as(labels_BS) for each in of_labels)

    def _parts(self, x_BsH: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
        """Each chunk's part of the hidden state, and of tensors with all positions of the tensor parallel group."""
        length = x_BsH.shape[1] * self.chunks.cut
        return list(zip(*(self.chunks.parts(each, length) for each in (x_BsH, *others))))

    def read(self, stream: Stream) -> Tensor:
        """The input of the logits [B, S, H], whole on every tensor parallel rank."""
        if not self.chunks.tokens:
            return enter(self.normed(stream.hidden), self.mesh)
        return torch.cat([enter(self.normed(part), self.mesh) for (part,) in self._parts(stream.hidden)], 1)

    def logits(self, stream: Stream) -> Tensor:
        """fp32 logits [B, S, V] of the whole vocabulary, on every rank."""
        return self.logits_at(self.read(stream))

    def scores(self, x_NH: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability [N] of each label in nats, and the likeliest id [N] in its place, for a `Reader`."""
        return token_scores(
            x_NH, self.matrix, self.bias, labels_N, first=self.span.start, axis=self.mesh.tensor, options=self.options
        )

    def logits_at(self, x: Tensor) -> Tensor:
        """fp32 logits [..., V] of the whole vocabulary from the head's input [..., H], on every rank."""
        local = logits_of(x, self.matrix, self.bias, self.options)
        if self.mesh.tensor.size == 1:
            return local
        whole = local.new_zeros((*local.shape[:-1], self.vocabulary))
        whole[..., self.span.start : self.span.stop] = local
        return all_reduce(whole, self.mesh.tensor)


@dataclass(frozen=True)
class Taught:
    """A teacher's head, and its input [B, S, H] of a micro-batch, on this rank."""

    head: Head
    x_BSH: Tensor


def final_norm(model: ModelSection) -> NormOptions:
    """The options of the norm before the head."""
    return model.norm if model.head.norm is None else model.norm.model_copy(update={"type": model.head.norm})


def embedding_counts(model: ModelSection) -> Counts:
    H = model.hidden_size
    rows = model.vocab_size + (model.embedding.max_positions if model.embedding.position == "learned" else 0)
    total = Counts(parameters=rows * H, activations=H if model.dropout > 0.0 else 0)
    if model.embedding.norm:
        total += Counts(parameters=norm_parameters(model.norm, H), activations=norm_activations(model.norm, H))
    if model.residual.channel_scales:
        total += Counts(parameters=2 * H, activations=H)
    return total


def head_counts(model: ModelSection, scores: bool = False) -> Counts:
    """Costs of the head. With tied embeddings the embedding counts the parameters of the matrix.

    The loss keeps the gradient of its input, and no logits.

    Args:
        scores: the head has one output (`Objective.scores`).
    """
    H, matrix = model.hidden_size, model.hidden_size * (1 if scores else model.vocab_size)
    own = matrix if scores or not model.embedding.tied else 0
    own += model.vocab_size if model.head.bias and not scores else 0
    norm = final_norm(model)
    return Counts(own + norm_parameters(norm, H), flops=2 * matrix, activations=norm_activations(norm, H) + H)


def multi_token_counts(model: ModelSection, sequence_length: int) -> Counts:
    """Costs of all modules that predict further tokens, with the work of the head for them. Only training has them."""
    H, total, norm = model.hidden_size, Counts(), final_norm(model)
    for number, block in enumerate(model.further_blocks, start=len(model.blocks)):
        own = replace(block_counts(model, block, sequence_length, number), state=0, memory=0)
        read = Counts(2 * norm_parameters(model.norm, H), activations=2 * norm_activations(model.norm, H))
        joined = Counts(2 * H * H, flops=4 * H * H, activations=2 * H)
        written = Counts(norm_parameters(norm, H), 2 * model.vocab_size * H, norm_activations(norm, H) + H)
        total += own + read + joined + written
    return total
