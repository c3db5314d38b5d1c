"""How initial values, learning rates and multipliers follow from the width and the depth of a model."""

from __future__ import annotations

from typing import Literal

from ..section import Section, key


class ParametrizationOptions(Section):
    type: Literal["standard", "mup", "completep"] = key(
        "standard",
        "standard: the same rates at every size. mup: those of a base model are right at every width. completep: at "
        "every width and depth.",
    )
    base_width: int | None = key(
        None, "model.hidden_size of the base model, whose rates and initial values these are.", unit="channels", gt=0
    )
    base_depth: int | None = key(
        None, "completep: number of blocks of the base model; model.init means that model's.", unit="blocks", gt=0
    )
    depth_exponent: float = key(
        1.0,
        "completep: a branch is multiplied by (blocks / base_depth) ** -this; 1 is CompleteP, 0.5 has other rates.",
        ge=0.5,
        le=1.0,
    )
    base_head_dim: int | None = key(
        None,
        "Channels per head of the base model: attention's scale is multiplied by sqrt(this / head_dim), so that it "
        "falls with 1 / head_dim; without it, heads are taken to grow in number, not in size.",
        unit="channels",
        gt=0,
    )
