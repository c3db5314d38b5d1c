"""Facts of NorMuon."""

from __future__ import annotations

from dataclasses import replace

from megatron.config.optimizer_kind import Option

from ..muon.options import OPTIMIZER as MUON

OPTIMIZER = replace(
    MUON,
    update="megatron.engine.optimizers.normuon.update:NorMuon",
    options={**MUON.options, "beta2": Option(0.95, 0, 1, "average of the squares of each row's steps", below=True)},
)
