"""Small token files and configurations for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron.config import Config, resolve
from megatron.data.token_file import TokenFile, TokenFileWriter


def write_documents(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> TokenFile:
    """A pair with these documents."""
    with TokenFileWriter(prefix, dtype) as writer:
        for document in documents:
            writer.append(document)
    return TokenFile(prefix)


def write_sizes(prefix: Path, sizes: list[int], seed: int = 0) -> TokenFile:
    """A pair of random documents with these sizes. Ids 1 ... 999."""
    random = np.random.default_rng(seed)
    return write_documents(prefix, [random.integers(1, 1000, size).tolist() for size in sizes])


def configuration(data: dict[str, Any], ranks: int = 1, **sections: dict[str, Any]) -> Config:
    """A tiny run with these data. Other sections are merged over the defaults given here."""
    values: dict[str, dict[str, Any]] = {
        "model": {"layers": "(attention/mlp) x1", "hidden_size": 16, "vocab_size": 50304, "attention": {"heads": 2}},
        "training": {"steps": 40, "sequence_length": 64, "global_batch_size": 8, "micro_batch_size": 4},
        "data": {"workers": 0, **data},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return resolve(values, ranks=ranks)
