"""Analysis of a model: one forward pass, with the activations of named layers and the gradients of named parameters."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.format.fragment import WEIGHT, weight_fragments
from megatron.checkpoint.read.reader import config_of
from megatron.checkpoint.save.store import find_checkpoint
from megatron.config import Config
from megatron.data.batch import StepBatch
from megatron.data.token_file import TokenFile
from megatron.model.stack import Model, build_model
from megatron.model.stream import Stream
from megatron.parallel.layers.parameters import logical_of
from megatron.parallel.layout.precision import TYPES

Edit = Callable[[Tensor], Tensor]


@dataclass
class Pass:
    """Results of a forward pass, and of its backward pass where gradients were asked for. B samples of S tokens.

    Attributes:
        loss: mean cross-entropy over the labels that count, in nats per token: what a training step logs.
        token_losses: cross-entropy of each label, fp32 [B, S].
        activations: output of each layer that was to be kept, [B, S, features].
        activation_gradients: the loss's gradient with respect to each of them.
        gradients: the loss's gradient with respect to each parameter, by logical name.
    """

    loss: float
    token_losses: Tensor
    activations: dict[str, Tensor] = field(default_factory=dict)
    activation_gradients: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class OpenModel:
    """A whole model on one device whose layers have names.

    Names follow the parameters' names: `embedding`, `layers.3` (the residual stream after the layer),
    `layers.3.attention` and `layers.3.mlp` (the branches that are added to it), `layers.3.attention.qkv`, ...

    Attributes:
        model: the module. Dropout is off.
        config: the resolved configuration.
        modules: the modules by layer name, in the order of the model.
    """

    def __init__(self, model: Model, config: Config) -> None:
        self.model, self.config = model.eval(), config
        self.modules = dict(_named(model))

    @classmethod
    def initial(cls, config: Config, device: str, dtype: str) -> "OpenModel":
        """With the initial values of a configuration."""
        return cls(build_model(_plain(config), device=device, dtype=TYPES[dtype]), config)

    @classmethod
    def of_checkpoint(cls, path: Path, device: str, dtype: str) -> "OpenModel":
        """With the weights of a checkpoint of any layout, or of the newest one of a run.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        checkpoint = open_checkpoint(find_checkpoint(path), verify="sizes")
        config = config_of(checkpoint)
        model = build_model(_plain(config), device=device, dtype=TYPES[dtype], values=False)
        checkpoint.read_into(weight_fragments(model), cast={WEIGHT})
        return cls(model, config)

    @property
    def layers(self) -> list[str]:
        """The names of all layers that can be kept or edited."""
        return list(self.modules)

    def forward(
        self,
        batch: StepBatch | Tensor,
        *,
        keep: Iterable[str] = (),
        gradients: bool = False,
        edit: Mapping[str, Edit] | None = None,
    ) -> Pass:
        """Run the model on a batch.

        Args:
            batch: a global batch from `megatron.api.batches`, or tokens [B, S + 1], all but the first being labels.
            keep: names of layers whose outputs are kept. A `*` stands for one word between dots: `layers.*` are the
                residual streams, `layers.*.attention` the outputs of attention.
            gradients: also run the backward pass, and return gradients of parameters and of the kept outputs.
            edit: functions by layer name. A function's result takes the place of the layer's output.

        Raises:
            KeyError: no layer has such a name.
        """
        names, edits = self._chosen(keep), dict(edit or {})
        for name in edits:
            self._chosen([name])
        kept: dict[str, list[Tensor]] = {name: [] for name in names}
        losses: list[Tensor] = []
        total = 0.0
        self.model.zero_grad(set_to_none=True)
        with ExitStack() as stack, torch.set_grad_enabled(gradients):
            for name in dict.fromkeys([*edits, *names]):
                hook = _hook(kept.get(name), edits.get(name), gradients)
                stack.callback(self.modules[name].register_forward_hook(hook).remove)
            for tokens, labels, weights, extras in self._micro_batches(batch):
                loss, token_losses = self.model(tokens, labels, weights, **extras)
                if gradients:
                    loss.backward()
                total += loss.item()
                losses.append(token_losses.detach())
        found = Pass(total, torch.cat(losses))
        found.activations = {name: torch.cat([each.detach() for each in outputs]) for name, outputs in kept.items()}
        if gradients:
            for name, outputs in kept.items():
                parts = [each.grad for each in outputs if each.grad is not None]
                if len(parts) == len(outputs):
                    found.activation_gradients[name] = torch.cat(parts)
            owners = ((logical_of(each), each.grad) for each in self.model.parameters() if each.grad is not None)
            found.gradients = {tensor.name: gradient.view(tensor.shape) for tensor, gradient in owners}
            self.model.zero_grad(set_to_none=True)
        return found

    def logits(self, tokens: Tensor) -> Tensor:
        """fp32 logits [B, S, V] of tokens [B, S]."""
        with torch.no_grad():
            return self.model.logits(tokens.to(self._device))

    @torch.no_grad()
    def log_probabilities(self, path: str | os.PathLike) -> np.ndarray:
        """Log-probability in nats of each token of a token file, given the tokens of its document before it.

        Returns:
            float32, one for each token in the file's order, 0 for the first token of each document. Preference pairs
            read it as the reference (`data.options.chosen_reference`).
        """
        file = TokenFile(path)
        found = np.zeros(file.tokens, np.float32)
        for number, first in enumerate(file.starts(slice(None)).tolist()):
            tokens = torch.from_numpy(file[number].astype(np.int64))[None].to(self._device)
            if tokens.shape[1] < 2:
                continue
            weights, named = self._inputs(tokens[:, :-1])
            ce = self.model(tokens[:, :-1], tokens[:, 1:], weights, **named)[1]
            found[first + 1 : first + tokens.shape[1]] = -ce[0].cpu().numpy()
        return found

    @torch.no_grad()
    def reward(self, tokens: Sequence[int] | np.ndarray) -> float:
        """The value of a text's last token under a reward model (`objective.type: reward_model`).

        Raises:
            ValueError: the model is no reward model, or the text has no token, more than the model has positions for,
                or ids beyond the vocabulary.
        """
        own, model = np.asarray(tokens, np.int64), self.config.model
        if not len(own):
            raise ValueError("a text must have a token")
        if own.min() < 0 or own.max() >= model.vocab_size:
            raise ValueError(f"ids must be below {model.vocab_size}, not {own.min()} ... {own.max()}")
        most = model.embedding.max_positions if model.embedding.position == "learned" else None
        if most is not None and len(own) > most:
            raise ValueError(f"a text must have at most {most} tokens, not {len(own)}: the model has no more positions")
        ids = torch.from_numpy(own)[None].to(self._device)
        weights, named = self._inputs(ids)
        values = self.model(ids, ids, weights, **named, reader=lambda head, x: head.values_at(x))
        return float(values[0, -1])

    def _inputs(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights and side inputs of a text that is one document."""
        places = torch.arange(tokens.shape[1], dtype=torch.int32, device=self._device)[None]
        named = {"positions": places, "documents": torch.zeros_like(places), "samples": places[:, 0].long()}
        return torch.ones_like(places).float(), {name: named[name] for name in self.model.form.optional}

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _chosen(self, patterns: Iterable[str]) -> list[str]:
        chosen: list[str] = []
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = [name for name in self.modules if _fits(name, pattern)]
            if not found:
                raise KeyError(f"there is no layer {pattern!r}. See .layers: {', '.join(self.layers[:8])}, ...")
            chosen += found
        return list(dict.fromkeys(chosen))

    def _micro_batches(self, batch: StepBatch | Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]:
        """(tokens, labels, weights that add up to one over the batch, side inputs) of each micro-batch."""
        if isinstance(batch, Tensor):
            ids = torch.arange(batch.shape[0])[None]
            batch = StepBatch(0, batch[None], ids, 0)
            if "documents" in self.model.form.optional:
                raise ValueError("packed documents do not attend to each other: give a batch of megatron.api.batches")
        mask = batch.loss_mask if batch.loss_mask is not None else torch.ones(batch.labels.shape)
        weights, device = mask.double() / mask.double().sum(), self._device
        named = {"positions": batch.positions, "documents": batch.documents, "samples": batch.sample_ids}
        missing = [name for name in self.model.form.optional if named[name] is None]
        if missing:
            raise ValueError(f"the batch has no {' and no '.join(missing)}, which this model reads")
        wanted = {name: named[name] for name in self.model.form.optional}
        for index in range(batch.accumulation):
            extras: dict[str, Any] = {name: each[index].to(device) for name, each in wanted.items() if each is not None}
            if batch.columns:
                extras["columns"] = {name: each[index].to(device) for name, each in batch.columns.items()}
            inputs, labels = batch.inputs[index].to(device), batch.labels[index].to(device)
            yield inputs, labels, weights[index].float().to(device), extras


def _fits(name: str, pattern: str) -> bool:
    words, wanted = name.split("."), pattern.split(".")
    return len(words) == len(wanted) and all(fnmatch(*pair) for pair in zip(words, wanted))


def _plain(config: Config) -> Config:
    """The same model, computed without recomputation or compilation, which would hide or repeat what hooks see."""
    training = config.training
    changed = {
        "activation_checkpointing": training.activation_checkpointing.model_copy(update={"mode": "none"}),
        "compile": "off",
    }
    return config.model_copy(update={"training": training.model_copy(update=changed)})


def _named(model: Model) -> Iterator[tuple[str, nn.Module]]:
    yield "embedding", model.embedding
    for index, block in enumerate(model.blocks):
        yield f"layers.{index}", block
        parts = {"mixer": block.pattern.mixer, "ffn": block.pattern.ffn}
        for name, module in block.named_modules():
            head, _, rest = name.partition(".")
            if head == "mixer" and rest and len(block.pattern.mixers) > 1:  # the layers of a SideBySide have the names
                head = ""
            elif name and (kind := parts.get(head)) is not None:
                head = kind.name
            if name:
                yield ".".join(filter(None, (f"layers.{index}", head, rest))), module


def _hook(kept: list[Tensor] | None, edit: Edit | None, gradients: bool) -> Callable:
    """A forward hook that replaces, then keeps, a module's output: a tensor, a stream, or a tuple with one first."""

    def hook(_module: nn.Module, _inputs: Sequence, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        tensor = value.hidden if isinstance(value, Stream) else value
        if edit is not None:
            tensor = edit(tensor)
            value = value.with_hidden(tensor) if isinstance(value, Stream) else tensor
            output = (value, *output[1:]) if isinstance(output, tuple) else value
        if kept is not None:
            if gradients and tensor.requires_grad:
                tensor.retain_grad()
            kept.append(tensor)
        return output

    return hook
