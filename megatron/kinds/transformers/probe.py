"""Checks of a model of transformers before it is trained: its logits follow from one matrix, and it is causal.

The loss is then computed from the input of that matrix, in chunks, so whole logits never exist."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .facts import FactsError

SMALL = 2**25  # parameters of a model that the launcher runs
TOKENS = 8
WIDE = 100.0  # initial products may be so small that no cap shows
EXACT = 1e-5  # two orders of the same fp32 sums, relative to the largest logit


@dataclass(frozen=True)
class Form:
    """logits = softcap * tanh(multiplier * (W x + b) / softcap)."""

    multiplier: float = 1.0
    softcap: float | None = None

    def of(self, products: Tensor) -> Tensor:
        """Logits of W x + b."""
        scaled = products * self.multiplier
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


def output_of(model: PreTrainedModel) -> nn.Linear:
    """The layer that makes the logits.

    Raises:
        FactsError: the class does not name one, or it is no linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), Tensor) or head.weight.ndim != 2:
        rule = f"{type(model).__name__} must name the matrix of its logits (get_output_embeddings), and does not"
        raise FactsError(".config", rule, "use another class")
    return head


def other_parts(model: PreTrainedModel) -> tuple[str, ...]:
    """Prefixes of the names of models inside the class that are not of text, such as of pictures and sound."""
    own = (model.config.model_type, model.config.get_text_config().model_type)
    parts = {name: each for name, each in model.named_modules() if isinstance(each, PreTrainedModel)}
    return tuple(f"{name}." for name, each in parts.items() if each.config.model_type not in own)


def positions_of(model: PreTrainedModel) -> int | None:
    """Rows of the smallest table of absolute positions of the text."""
    rows = [
        each.num_embeddings
        for name, each in model.named_modules()
        if isinstance(each, nn.Embedding)
        and (name.rsplit(".", 1)[-1] == "wpe" or "position" in name.rsplit(".", 1)[-1])
        and "rel" not in name.rsplit(".", 1)[-1]
        and not name.startswith(other_parts(model))
    ]
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not rows:
        return None
    return min([*rows, own] if isinstance(own, int) and own > 0 else rows)


@torch.no_grad()
def probe(model: PreTrainedModel) -> Form:
    """How the logits follow from the output layer.

    Args:
        model: with values, in fp32, whole.

    Raises:
        FactsError: they do not follow from it, or a token's logits depend on later tokens.
    """
    head, was_training = output_of(model), model.training
    model.eval()
    inputs: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    before = [each._version for each in model.parameters()]
    try:
        tokens = (torch.arange(2 * TOKENS).view(2, TOKENS) * 7 + 3) % head.weight.shape[0]
        logits = read(model, tokens)
        if not inputs:
            rule = f"{type(model).__name__} must call its output layer, and does not"
            raise FactsError(".config", rule, "use another class")
        seen = inputs[-1]
        later = tokens.clone()
        later[:, -1] = (tokens[:, -1] + 1) % head.weight.shape[0]
        changed = read(model, later)
        spread = torch.linspace(-WIDE, WIDE, head.weight.shape[0])
        wide = _with_output(model, head, spread, tokens)
    except FactsError:
        raise
    except Exception as error:  # a class may raise anything
        rule = f"must compute logits from token ids. It says: {type(error).__name__}: {str(error)[:300]}"
        raise FactsError(".config", rule, "use another class, or other model.transformers.options") from error
    finally:
        handle.remove()
        model.train(was_training)
    if before != [each._version for each in model.parameters()]:
        rule = f"an evaluation must keep the weights, and {type(model).__name__} changes them"
        raise FactsError(".options", rule, "set options: {rescale_every: 0} for rwkv. Or use another class")
    if seen.shape[:-1] != tokens.shape or logits.shape != (*tokens.shape, head.weight.shape[0]):
        rule = f"logits of {type(model).__name__} must be [batch, sequence, vocabulary] from its output layer"
        raise FactsError(
            ".config", f"{rule}, and are {list(logits.shape)} from {list(seen.shape)}", "use another class"
        )
    if not same(logits[:, :-1], changed[:, :-1]):
        raise FactsError(
            ".options",
            f"{type(model).__name__} must be causal, and with these settings a token's logits depend on later tokens",
            "for encoders set options: {is_decoder: true}",
        )
    plain = nn.functional.linear(seen, head.weight, getattr(head, "bias", None))
    for form in _forms(model, spread.expand_as(wide), wide):
        if same(form.of(plain), logits) and same(form.of(spread).expand_as(wide), wide):
            return form
    rule = f"logits of {type(model).__name__} must be the product with its output layer, scaled or capped, and are not"
    raise FactsError(".config", rule, "use another class")


def _with_output(model: PreTrainedModel, head: nn.Module, output_V: Tensor, tokens_BS: Tensor) -> Tensor:
    """Logits [B, S, V] where the output layer returns this for each token."""
    handle = head.register_forward_hook(lambda _module, _given, own: output_V.to(own.dtype).expand_as(own).clone())
    try:
        return read(model, tokens_BS)
    finally:
        handle.remove()


def same(a: Tensor, b: Tensor, bound: float = EXACT) -> bool:
    largest = max(a.abs().max().item(), b.abs().max().item())
    return math.isfinite(largest) and (a - b).abs().max().item() <= bound * largest


def _forms(model: PreTrainedModel, plain: Tensor, logits: Tensor) -> Iterator[Form]:
    """Candidates, from the numbers in the model's settings."""
    yield Form()
    fitted = (logits.double() * plain.double()).sum() / plain.double().square().sum()
    numbers = _numbers(model.config.get_text_config()) | _numbers(model.config)
    scales = [each for value in numbers.values() if value for each in (value, 1 / value)]
    scales = [1.0, *sorted(set(scales), key=lambda each: abs(each - fitted.item()))[:2]]
    yield from (Form(each) for each in scales)
    caps = [value for name, value in numbers.items() if "cap" in name and value > 0]
    yield from (Form(each, cap) for each in scales for cap in caps)
    yield Form(fitted.item())


def _numbers(settings: Any) -> dict[str, float]:
    values = {**vars(settings), **settings.to_dict()}
    return {
        name: float(value) for name, value in values.items() if isinstance(value, float | int) and value is not True
    }


def angles_of(model: PreTrainedModel) -> tuple[float, float]:
    """Tokens of a text beyond which all its tokens have other rotary angles: once, and with each token."""
    settings, once, each_token = model.config.get_text_config(), math.inf, math.inf
    longest, rest = getattr(settings, "max_position_embeddings", 0), [getattr(settings, "rope_parameters", None)]
    while rest:
        if isinstance(own := rest.pop(), dict):
            rest += own.values()
            kind = str(own.get("rope_type"))
            if kind == "longrope":
                once = min(once, own.get("original_max_position_embeddings") or longest)
            elif "dynamic" in kind:
                each_token = min(each_token, longest)
    return once, each_token


def arguments_of(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of a pass that keeps no cache, as far as the class knows them."""
    import inspect

    known = inspect.signature(model.forward).parameters
    return {name: False for name in ("use_cache", "use_mems") if name in known}


def read(model: PreTrainedModel, tokens_BS: Tensor, **more: Any) -> Tensor:
    """Logits [B, S, V]."""
    return model(input_ids=tokens_BS, **arguments_of(model), **more).logits


@torch.no_grad()
def keeps_apart(model: PreTrainedModel) -> bool:
    """Whether positions that begin again separate documents of a sample: the second document has the same logits
    without the first."""
    vocabulary, was_training = output_of(model).weight.shape[0], model.training
    tokens = (torch.arange(4 * TOKENS).view(2, -1) * 7 + 3) % vocabulary
    positions = torch.arange(TOKENS).repeat(2, 2)
    model.eval()
    try:
        both = read(model, tokens, position_ids=positions)[:, TOKENS:]
        return same(both, read(model, tokens[:, TOKENS:]))
    except Exception:  # a class may raise anything, such as that it has no such argument
        return False
    finally:
        model.train(was_training)
