#!/usr/bin/env python3
"""Find the principal components of a model's keys, by which Loki chooses keys in decoding.

    deepy calibrate runs/my --file texts.txt --output my.loki --measure
    deepy generate runs/my --loki my.loki --rank 0.9 --keys 0.25 --prompt "Once"

The last quarter of the text is excluded from the calibration. With --measure its loss is computed with full attention,
with Loki and with SiftAttention, which needs no calibration. --picture draws these numbers over the share that
is read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from megatron.config.admitted import add_flag  # noqa: E402
from megatron.config.file_access import OutputError, keep_inputs, same_file, writing  # noqa: E402
from megatron.config.problems import UserError, aligned  # noqa: E402
from megatron.extras import require  # noqa: E402

if TYPE_CHECKING:
    from megatron.decoding.read_less import Components
    from megatron.model.stack import Model

SHARES = (1 / 8, 1 / 4, 1 / 2)  # of a head's components, and of a text's keys
QUANTILES = (0.5, 0.8, 0.95)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("path", type=Path, help="a run's directory, a folder of checkpoints, or a checkpoint")
    add("--file", type=Path, required=True, nargs="+", help="texts of the kind that will be read")
    add("--output", type=Path, required=True, metavar="FILE", help="the components, as safetensors")
    add("--tokens", type=int, default=1 << 16, help="tokens that are read at most (default: %(default)s)")
    add("--measure", action="store_true", help="also print losses, recall and reads on the last quarter of the text")
    add("--picture", type=Path, metavar="FILE", help="with --measure: PNG of perplexity and recall over the share read")
    add("--device", help="cpu or cuda (default: a GPU if there is one)")
    add("--json", action="store_true", help="print one JSON document")
    add_flag(parser)
    return parser


def pieces(files: list[Path], tokenizer: Any, length: int, most: int) -> list[list[int]]:
    """The first tokens of the texts, in samples of the run's length."""
    ids: list[int] = []
    for file in files:
        try:
            ids += tokenizer.encode(file.read_text("utf-8"))
        except (OSError, UnicodeError) as error:
            raise UserError(f"--file: {file} cannot be read as UTF-8: {error}") from error
    count = min(len(ids), most) // length
    if count < 4:
        raise UserError(f"--file must have at least {4 * length} tokens, four samples of {length}, not {len(ids)}")
    return [ids[at * length : (at + 1) * length] for at in range(count)]


def measured(model: Model, found: Components, texts: list[list[int]], device: Any) -> Iterator[dict[str, Any]]:
    """Losses of ways of reading, each of the second half of all samples."""
    from megatron.decoding.read_less import loss_of, sift
    from megatron.kinds.common.attention.fewer_keys import Reads

    before, channels = len(texts[0]) // 2, max(each.shape[-1] for each in found.variances)
    yield {"way": "full attention", "loss": loss_of(model, texts, None, before, device), "read": 1.0}
    for rank in dict.fromkeys(max(1, int(share * channels)) for share in SHARES):
        for keys in SHARES:
            reads = Reads(measures=True)
            loss = loss_of(model, texts, found.reading(rank, keys, reads), before, device)
            yield {
                "way": f"loki, rank {rank}, keys {keys:g}",
                "loss": loss,
                **shares(reads),
                "recall": reads.recall / reads.heads,
            }
    for quantile in QUANTILES:
        reads = Reads(measures=True)
        loss = loss_of(model, texts, sift(quantile, 16, reads=reads), before, device)
        yield {"way": f"sift, quantile {quantile:g}, warmup 16", "loss": loss, **shares(reads)}


def shares(reads: Any) -> dict[str, float]:
    return {"read": reads.read / reads.full, "dropped": reads.dropped / reads.heads}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [["way", "loss", "perplexity", "numbers read", "recall", "probability dropped"]]
    for each in rows:
        loss = each["loss"]
        more = ["-" if name not in each else f"{each[name]:.3f}" for name in ("read", "recall", "dropped")]
        lines.append([each["way"], f"{loss:.4f}", f"{math.exp(loss):.3f}", *more])
    return aligned(lines)


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Perplexity, and the share of the largest keys and of the probability, over the share of numbers read."""
    from megatron.report.figures import new_figure, write_figure

    figure = new_figure(10, 4, 120)
    left, right = figure.subplots(1, 2)
    left.axhline(math.exp(rows[0]["loss"]), color="0.6", linewidth=1, label=rows[0]["way"])
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in rows[1:]:
        name = each["way"].rpartition(",")[0] if "recall" in each else "sift"
        groups.setdefault(name, []).append(each)
    for number, (name, own) in enumerate(groups.items()):
        style = {"marker": "o", "markersize": 4, "linewidth": 1.2, "color": f"C{number}"}
        xs = [each["read"] for each in own]
        left.plot(xs, [math.exp(each["loss"]) for each in own], label=name, **style)
        if "recall" in own[0]:
            right.plot(xs, [each["recall"] for each in own], label=f"{name}: recall of the largest keys", **style)
        kept = [1 - each["dropped"] for each in own]
        right.plot(xs, kept, label=f"{name}: probability", **{**style, "linestyle": "--", "markersize": 3})
    left.set(ylabel="perplexity", xlabel="numbers read, relative to full attention")
    right.set(ylabel="share that is read", xlabel="numbers read, relative to full attention", ylim=(0, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    write_figure(figure, path)


def main(arguments: list[str] | None = None) -> int:
    parser = options()
    given = parser.parse_args(arguments)
    if given.picture is not None:
        if not given.measure:
            parser.error("--picture needs --measure")
        if same_file(given.picture, given.output):
            parser.error("--picture must be another file than --output")
        require("matplotlib")
    import torch

    from megatron.checkpoint import CheckpointError
    from megatron.checkpoint.save.store import find_checkpoint
    from megatron.config import ConfigError
    from megatron.data.tokenizer import build_tokenizer
    from megatron.decoding.covered import cannot_read_less
    from megatron.decoding.read_less import calibrate, write
    from megatron.training.text import load_model

    try:
        keep_inputs([each for each in (given.output, given.picture) if each is not None], given.file)
        device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model, config = load_model(find_checkpoint(given.path), device)
        if (reason := cannot_read_less(config)) is not None:
            raise UserError(f"{given.path}: this model cannot read less: {reason}")
        texts = pieces(given.file, build_tokenizer(config.tokenizer), config.training.sequence_length, given.tokens)
        border = len(texts) - len(texts) // 4
        found = calibrate(model, texts[:border], device)
        with writing(given.output):
            write(given.output, found)
        rows = list(measured(model, found, texts[border:], device)) if given.measure else []
        if given.picture is not None:
            with writing(given.picture, "--picture"):
                draw(given.picture, rows)
    except (CheckpointError, ConfigError, OutputError, UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ranks = {f"{share:g}": found.rank(share) for share in (0.5, 0.9, 0.99)}
    if given.json:
        print(json.dumps({"output": str(given.output), "ranks": ranks, "measured": rows}, indent=2))
        return 0
    print(f"{given.output}: components of {len(found.bases)} layers, from {border * len(texts[0]):,} tokens")
    for share, each in ranks.items():
        print(f"components that explain less than {share} of the variance, by layer: {' '.join(map(str, each))}")
    print("\n".join(["", *table(rows)] if rows else []))
    return 0


if __name__ == "__main__":
    from megatron.pipes import piped

    sys.exit(piped(main))
