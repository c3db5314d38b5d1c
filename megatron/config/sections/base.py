"""What every section is made of: a frozen, closed pydantic model whose keys carry a sentence and a unit."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..frozen import freeze


class Section(BaseModel):
    """A closed, frozen group of keys. Unknown keys and silent type conversions are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=False, allow_inf_nan=False, protected_namespaces=()
    )

    def model_post_init(self, context: Any) -> None:
        """Freeze lists and dictionaries too: `frozen` alone only guards the attributes."""
        for name, value in self.__dict__.items():
            if isinstance(value, (list, dict, tuple)):
                self.__dict__[name] = freeze(value)


def key(default: Any, sentence: str, *, unit: str | None = None, derived: str | None = None, **limits: Any) -> Any:
    """Declare a key.

    Args:
        default: the value when the user says nothing; `...` makes the key required. A callable is a factory.
        sentence: one sentence that says what the key means.
        unit: the unit of the value ("tokens", "seconds", "bytes", ...), shown in the docs.
        derived: for keys whose default is None: the formula that fills them in, in terms of other keys.
        limits: pydantic constraints (`gt`, `ge`, `le`, `lt`, `min_length`, ...).
    """
    extra = {name: value for name, value in (("unit", unit), ("derived", derived)) if value}
    factory = {"default_factory": default} if callable(default) else {"default": default}
    return Field(**factory, description=sentence, json_schema_extra=extra or None, **limits)
