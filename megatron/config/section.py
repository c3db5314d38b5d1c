"""The base of all sections: a frozen, closed pydantic model whose keys have a sentence and a unit. Shared sections."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from .registry import ADDED, INSIDE
from .tree import SCALARS, freeze

T = TypeVar("T")

if TYPE_CHECKING:
    Derivable = Annotated[T, "derived"]
    Needed = Annotated[T, "needed"]
else:

    class Derivable:
        """`Derivable[int]` is the type of a key that resolution fills in: `int | None` to pydantic, since a user may
        omit it, and `int` to type checkers, since code reads resolved configurations. Rules and derivations must still
        test for None."""

        def __class_getitem__(cls, item: Any) -> Any:
            return item | None

    class Needed(Derivable):
        """Likewise, the type of a key without a default that a rule requires where it is read, such as the heads of
        attention."""


class Section(BaseModel):
    """A closed, frozen group of keys. Unknown keys and silent type conversions are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=False, allow_inf_nan=False, protected_namespaces=()
    )

    def model_post_init(self, context: Any) -> None:
        """Freeze lists and dictionaries too: `frozen` only guards the attributes."""
        if SCALARS.issuperset(map(type, self.__dict__.values())):
            return
        for name, value in self.__dict__.items():
            if isinstance(value, (list, dict, tuple)):
                self.__dict__[name] = freeze(value)


@dataclass(frozen=True)
class Derived:
    """How a key is filled in where the user says nothing.

    Attributes:
        formula: in words, in terms of other keys.
        function: of the values of the key's own section (a nested dictionary) and of a `derive.View` on all values. It
            gives None where the key has no meaning or an input is not known.
        reads: the keys that the formula reads. One that begins with a dot is of the key's own section.
    """

    formula: str
    function: Callable[[dict[str, Any], Any], Any]
    reads: tuple[str, ...] = ()


def same_as(name: str) -> Derived:
    """The value of another key."""
    return Derived(name, lambda own, at: at[name], (name,))


def key(
    default: Any,
    sentence: str,
    *,
    unit: str | None = None,
    derived: str | Derived | None = None,
    role: str | None = None,
    words: tuple[str, ...] = (),
    **limits: Any,
) -> Any:
    """Declare a key.

    Args:
        default: the value where the user gives none. `...` makes the key required. A callable is a factory.
        sentence: one sentence that says what the key means.
        unit: the unit of the value ("tokens", "seconds", "bytes", ...), shown in the docs.
        derived: for keys whose default is None: the formula. Only text where a start or the machine fills it in.
        role: for keys whose value is a name in the registry, or an import path: the table that it is looked up in.
        words: further values of such a key.
        limits: pydantic constraints (`gt`, `ge`, `le`, `lt`, `min_length`, ...).
    """
    formula = derived.formula if isinstance(derived, Derived) else derived
    extra: dict[str, Any] = {name: value for name, value in (("unit", unit), ("derived", formula)) if value}
    if role:
        names = [*words, *(INSIDE[role] if role not in ADDED else ())]
        path = {"pattern": "^[A-Za-z_]\\w*(\\.\\w+)*:\\w+$"}
        extra |= {"role": role, "words": list(words), "anyOf": [{"enum": names}, path] if names else [path]}
    factory = {"default_factory": default} if callable(default) else {"default": default}
    field = Field(**factory, description=sentence, json_schema_extra=extra or None, **limits)
    if isinstance(derived, Derived):
        field.metadata.append(derived)  # pydantic keeps what it does not know
    return field


class Addition(Section):
    """A part of a run from a user's package, with its options."""

    options: dict[str, Any] = key(dict, "Keyword arguments that it is made with.")


class RotaryScaling(Section):
    type: Literal["none", "linear", "llama3", "yarn", "dynamic", "proportional"] = key(
        "none",
        "How rotary frequencies are stretched for longer contexts. proportional: as linear, and with a fraction the "
        "first channels of each half of a head turn, by the frequencies of a head that turns whole (Gemma 4).",
    )
    factor: float = key(1.0, "Ratio of the new context length to the original one.", gt=0)
    original_length: Needed[int] = key(
        None, "Context length the frequencies were made for. llama3, yarn and dynamic need it.", unit="tokens", gt=0
    )
    low_frequency_factor: float = key(1.0, "llama3: full stretch of wavelengths above original_length / this.", gt=0)
    high_frequency_factor: float = key(4.0, "llama3: no stretch of wavelengths below original_length / this.", gt=0)
    beta_fast: float = key(32.0, "yarn: number of rotations above which a frequency is not stretched.", gt=0)
    beta_slow: float = key(1.0, "yarn: number of rotations below which a frequency is fully stretched.", gt=0)
    truncate: bool = key(True, "yarn: round the two channels between which frequencies are stretched (not: GPT-OSS).")
    attention_factor: Derivable[float] = key(
        None,
        "yarn: multiplier of cos and sin.",
        derived=Derived(
            "0.1 * ln(factor) + 1",
            lambda own, at: 0.1 * math.log(max(own["factor"], 1.0)) + 1.0 if own["type"] == "yarn" else None,
            (".factor",),
        ),
        gt=0,
    )


class RotaryOptions(Section):
    base: float = key(10000.0, "Base of the rotary frequencies (rope theta).", gt=0)
    fraction: float = key(1.0, "Share of each head's channels that are rotated (rotary_pct).", ge=0, le=1)
    scaling: RotaryScaling = key(RotaryScaling, "Frequency scaling for contexts longer than the original.")
