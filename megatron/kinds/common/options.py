"""Options and rules that several kinds of layers share. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from megatron.config.kind import KindUse
from megatron.config.problems import divisors, multiples, near
from megatron.config.section import Derived, Section, key

if TYPE_CHECKING:
    from megatron.config.derive import View
    from megatron.config.problems import Problem

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu2", "identity", "quick_gelu"]
MLP_WIDTH = "4 * model.hidden_size (gated: 8/3 * model.hidden_size rounded up to 256)"


def derived_key(
    about: str, formula: str, function: Callable[[dict[str, Any], View], Any], reads: str, *, unit: str | None = None
) -> Any:
    """A key above 0 that follows from others where the user says nothing.

    Args:
        about, unit: as in `key`.
        formula, function: as in `Derived`.
        reads: the keys that the formula reads, separated by spaces.
    """
    return key(None, about, unit=unit, derived=Derived(formula, function, tuple(reads.split())), gt=0)


class RecurrentOptions(Section):
    """Options of mixers with a convolution in front of a decaying state."""

    convolution: int = key(4, "Taps of the causal convolution along the sequence.", unit="tokens", gt=0)
    convolution_bias: bool = key(True, "Whether the convolution has a bias.")
    time_step_low: float = key(0.001, "Initial time steps are log-uniform from here ...", gt=0)
    time_step_high: float = key(0.1, "... to here.", gt=0)
    time_step_floor: float = key(1e-4, "No initial time step is smaller.", gt=0)


class StateSpaceOptions(RecurrentOptions):
    """Options of the Mamba family."""

    expand: int = key(2, "Inner channels of the mixer over model.hidden_size.", gt=0)
    bias: bool = key(False, "Whether the projections into and out of the mixer have biases.")


def mlp_width(kind: str) -> Callable[[dict[str, Any], View], int | None]:
    """The derived width of a feed-forward network, by `MLP_WIDTH`."""

    def width(own: dict[str, Any], at: View) -> int | None:
        if not at.uses(kind):
            return None
        channels = at["model.hidden_size"]
        return -(-8 * channels // (3 * 256)) * 256 if own["gated"] else 4 * channels

    return width


def heads_are_given(at: KindUse[Any]) -> Iterator[Problem]:
    if at.options.heads is None:
        yield at.problem(
            ".heads model.layers",
            rule=f"the number of heads must be given for a pattern with {at.kind} layers",
            fix=f"give model.{at.kind}.heads, for example model.hidden_size / 64",
        )


def heads_have_channels(width: str, count: str, unit: str) -> Callable[[KindUse[Any]], Iterator[Problem]]:
    """A rule on the width of heads that follows from the model's: none is left where the heads are too many."""

    def rule(at: KindUse[Any]) -> Iterator[Problem]:
        heads = getattr(at.options, count)
        if heads and getattr(at.options, width) is None:
            yield at.problem(
                f".{width}",
                f".{count}" if heads != at.options.heads else ".heads",
                "model.hidden_size",
                rule=f"each of {heads} {unit} must have a channel, and none is left",
                fix=f"give {width}, or fewer heads",
            )

    return rule


def divides_heads(name: str) -> Callable[[KindUse[Any]], Iterator[Problem]]:
    """A rule on a number of heads with keys: all of them serve the same number of heads."""

    def rule(at: KindUse[Any]) -> Iterator[Problem]:
        heads, few = at.options.heads, getattr(at.options, name)
        if heads and few and heads % few:
            yield at.problem(
                f".{name} .heads",
                rule=f"each of the {name} must serve the same number of heads: heads % {name} must be 0",
                fix=f"use {near(few, divisors(heads))} {name}",
            )

    return rule


def rotated_channels_are_pairs(at: KindUse[Any]) -> Iterator[Problem]:
    own = at.options
    if own.position != "rotary" or not own.head_dim or own.rotary.fraction == 0:
        return
    rotated = int(own.head_dim * own.rotary.fraction)
    if rotated % 2 or not rotated:
        even = [each / own.head_dim for each in (rotated // 2 * 2, rotated // 2 * 2 + 2) if 0 < each <= own.head_dim]
        shares = " or ".join(f"{each:.6g}" for each in even)
        yield at.problem(
            ".head_dim .rotary.fraction",
            rule=f"rotary positions turn pairs of channels: head_dim * fraction must be a positive even number, not "
            f"{rotated}",
            fix=f"use rotary.fraction = {shares}, or another head_dim" if even else "use a head_dim of at least 2",
        )


def rotary_scaling_is_complete(at: KindUse[Any]) -> Iterator[Problem]:
    if at.options.position != "rotary":
        return
    scaling, keys = at.options.rotary.scaling, ".rotary.scaling"
    if scaling.type in ("llama3", "yarn", "dynamic") and scaling.original_length is None:
        yield at.problem(
            f"{keys}.original_length {keys}.type",
            rule=f"the original context length must be given for {scaling.type} scaling",
            fix="give scaling.original_length, the sequence length that the frequencies were trained with",
        )
    if scaling.type == "llama3" and scaling.high_frequency_factor <= scaling.low_frequency_factor:
        yield at.problem(
            f"{keys}.high_frequency_factor {keys}.low_frequency_factor",
            rule="high_frequency_factor must be above low_frequency_factor",
            fix="Llama 3 uses 4 and 1",
        )
    if scaling.type == "yarn" and scaling.beta_fast <= scaling.beta_slow:
        yield at.problem(f"{keys}.beta_fast {keys}.beta_slow", rule="must be above beta_slow", fix="YaRN uses 32 and 1")
    if scaling.type == "none" and scaling.factor != 1.0:
        yield at.problem(
            f"{keys}.factor {keys}.type",
            rule="a factor must come with a type: without one it has no effect",
            fix="give rotary.scaling.type: linear, llama3, yarn, dynamic or proportional",
        )


def in_order(low: str, high: str, fix: str, *, equal: bool = False) -> Callable[[KindUse[Any]], Iterator[Problem]]:
    """A rule: one option is above another, or `equal` to it."""

    def rule(at: KindUse[Any]) -> Iterator[Problem]:
        least, most = getattr(at.options, low), getattr(at.options, high)
        if most is not None and (most < least or most == least and not equal):
            must = f"{low} must not exceed {high}" if equal else f"{high} must be above {low}"
            yield at.problem(*sorted((f".{high}", f".{low}"), key=at.given, reverse=True), rule=must, fix=fix)

    return rule


time_steps_are_a_range = in_order("time_step_low", "time_step_high", "published models use 0.001 and 0.1", equal=True)


def divides_over_tensor_ranks(
    name: str | Callable[[KindUse[Any]], int | None], unit: str, *keys: str
) -> Callable[[KindUse[Any]], Iterator[Problem]]:
    """A rule: tensor parallel ranks share the `unit`s (heads, channels) of a layer evenly.

    Args:
        name: the option with their number, or a function that gives it.
        keys: that decide the number, where it is no option.
    """

    def rule(at: KindUse[Any]) -> Iterator[Problem]:
        count, ranks = name(at) if callable(name) else getattr(at.options, name), at.config.parallel.tensor
        if count and count % ranks:
            yield at.problem(
                *(keys or (f".{name}",)),
                "parallel.tensor",
                rule=f"each tensor parallel rank must have the same number of the {count} {unit} of {at.kind}",
                fix=f"use parallel.tensor = {near(ranks, divisors(count))}, or {multiples(count, ranks)} {unit}",
            )

    return rule


def parts_of_sequences_have_the_taps(
    needed: Callable[[Any], int], *names: str
) -> Callable[[KindUse[Any]], Iterator[Problem]]:
    """A rule: where ranks share a sequence, all tokens that a convolution reads before its own are on the rank before.

    Args:
        needed: number of these tokens, from the options.
        names: of the options that decide it.
    """

    def rule(at: KindUse[Any]) -> Iterator[Problem]:
        training, parallel, count = at.config.training, at.config.parallel, needed(at.options)
        ranks, chunks = parallel.context, training.sequence_chunks
        if ranks > 1 and training.sequence_length // chunks // ranks < count:
            of_chunk = (" of each chunk", ", fewer chunks,") if chunks > 1 else ("", ",")
            cut = parallel.tensor if parallel.sequence else 1
            enough = -(-count // cut) * cut * ranks * chunks
            yield at.problem(
                "training.sequence_length parallel.context",
                *(("training.sequence_chunks",) if chunks > 1 else ()),
                *names,
                rule=f"each of {ranks} ranks must have the {count} tokens{of_chunk[0]} that convolutions of the next "
                "one look back to",
                fix=f"use at least {enough} tokens{of_chunk[1]} or fewer ranks for a sequence",
            )

    return rule
