"""The model card: what was trained, on what, for how long, by which versions."""

from __future__ import annotations

import json

import torch

from megatron.config import Config, config_hash
from megatron.model.costs.describe import totals

from ..read.reader import Checkpoint
from .architecture import Architecture
from .versions import least_version


def model_card(checkpoint: Checkpoint, config: Config, architecture: Architecture, dtype: torch.dtype) -> str:
    """README.md of a Hugging Face folder."""
    meta, sizes = checkpoint.meta, totals(config)
    tokens = meta.data.get("tokens")
    optimizer, schedule = config.optimizer, config.schedule
    version, reason = least_version(architecture, config.model)
    facts = {
        "architecture": architecture.class_name,
        "transformers": f"{version} or later" + (f" ({reason})" if reason else ""),
        "parameters": f"{sizes.parameters:,} ({sizes.non_embedding_parameters:,} without embeddings)",
        "type of the weights": str(dtype).removeprefix("torch."),
        "step": f"{meta.step:,} of {config.training.steps:,}",
        "tokens seen": f"{tokens:,}" if tokens is not None else None,
        "sequence length": f"{config.training.sequence_length:,}",
        "global batch": f"{config.training.global_batch_size:,} samples" if config.training.global_batch_size else None,
        "optimizer": f"{optimizer.type}, peak learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}",
        "schedule": schedule.type,
        "seed": str(config.training.seed),
        "training data": ", ".join(f"{source.name} ({source.weight:g})" for source in config.data.train) or None,
        "tokenizer": f"{config.tokenizer.type} {config.tokenizer.path or ''}".strip(),
        "configuration": config_hash(config),
        "written by": ", ".join(f"{name} {version}" for name, version in meta.versions.items()),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value)
    notes = f"\n{config.run.notes}\n" if config.run.notes else ""
    head = "\n".join(["---", "library_name: transformers", "pipeline_tag: text-generation", "---"])
    return (
        f"{head}\n\n# {config.run.name}\n{notes}\n| | |\n|---|---|\n{rows}\n\n"
        f"```json\n{json.dumps({'layers': config.model.layers}, indent=2)}\n```\n"
    )
