"""Megatron-core's order of samples and its reading of them, from token files that ours reads too, as one JSON document.

`reading.py` runs `main` in a process of its own, because that package has our package's name: `pip install --no-deps
megatron-core` (it needs torch, numpy and packaging). It is found on the path that this process has without ours.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
OURS = str(Path(__file__).resolve().parents[2])


class Words:
    """All that the dataset asks of a tokenizer."""

    vocab_size, eod, pad = 50304, 0, 0
    unique_identifiers = {"class": "Words"}


def dataset(prefix: str, length: int, samples: int, cache: str) -> Any:
    """Their training set. The first call of a cache builds and writes the order, later ones read it."""
    import numpy as np
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=length,
        split="100,0,0",
        path_to_cache=cache,
        tokenizer=Words(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    file = GPTDataset.build_low_level_dataset(prefix, config)
    documents = np.arange(len(file.document_indices) - 1, dtype=np.int32)
    return GPTDataset(file, prefix, documents, samples, Split.train, config)


def timed(action: Any) -> tuple[float, Any]:
    begin = time.process_time()
    result = action()
    return time.process_time() - begin, result


def sums(folder: str) -> int:
    """Sum of the 8-byte words of all arrays in a folder: what ours compares with its checksums."""
    import numpy as np

    total, words = 0, np.zeros(1 << 15, "<u8")
    for path in Path(folder).rglob("*.npy"):
        with open(path, "rb") as file:
            while size := file.readinto(words.data.cast("B")):
                words.view(np.uint8)[size:] = 0
                total += int(words.sum(dtype=np.uint64))
    return total


def read(data: Any, batch: int, batches: int) -> tuple[float, str]:
    """Processor seconds of reading batches in order by torch's loader, in this process, and a hash of all tokens."""
    from torch.utils.data import DataLoader

    digest, loader = hashlib.sha256(), iter(DataLoader(data, batch_size=batch, shuffle=False))
    next(loader)

    def work() -> None:
        for _ in range(batches):
            digest.update(next(loader)["tokens"].numpy().tobytes()[:64])

    return timed(work)[0], digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--cache", required=True, help="folder of the order")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--batches", type=int, default=0, help="to read (0 reads none)")
    given = parser.parse_args()
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") not in (HERE, OURS)]
    warnings.simplefilter("ignore")
    import torch  # noqa: F401  (its import belongs to neither side)

    def make() -> Any:
        return dataset(given.prefix, given.sequence_length, given.samples, given.cache)

    timed(make)  # imports, and the first order
    found: dict[str, Any] = {"samples": given.samples}
    for path in Path(given.cache).rglob("*.npy"):
        path.unlink()
    found["build"], data = timed(make)
    found["load"], data = timed(make)
    found["checked"] = found["load"] + timed(lambda: sums(given.cache))[0]
    if given.batches:
        found["read"], found["hash"] = read(data, given.batch, given.batches)
    print(json.dumps(found))
    return 0
