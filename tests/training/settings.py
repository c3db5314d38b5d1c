"""Configurations for the tests of this folder: real sections with the derived values that these tests need."""

from __future__ import annotations

from megatron.config.schema import Config


def settings(steps: int = 10, batch: int = 4, length: int = 8, **sections: dict) -> Config:
    """A `Config` with a schedule of `steps` steps. `sections` are merged over it."""
    values = {
        "model": {"layers": "(attention/mlp) x1", "hidden_size": 8},
        "training": {"steps": steps, "sequence_length": length, "global_batch_size": batch, "accumulation": batch},
        "schedule": {"steps": steps, "decay_steps": max(steps // 10, 1)},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Config.model_validate(values)
