#!/usr/bin/env python
"""Show the data of a step: the documents of each sequence, and their origins.

    deepy data batch runs/pythia --step 1234
    deepy data batch runs/pythia --step 1234 --rank 3 --text
    deepy data batch runs/pythia --step 1000 --to 1009 --export batches.npy

Uses the run's configuration and its data, without a checkpoint. Steps count from 0.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files here hide modules of the library.
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))

import argparse  # noqa: E402
from dataclasses import asdict  # noqa: E402

from tools.data.command import add_shared, run_left_out, run_tool  # noqa: E402


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its config.yml")
    parser.add_argument("--step", type=int, required=True, help="the step")
    parser.add_argument("--to", type=int, metavar="STEP", help="the last of several steps (inclusive)")
    parser.add_argument("--rank", type=int, help="only the sequences of this data parallel rank")
    add_shared(parser, "--split", "default: %(default)s")
    parser.add_argument("--name", help="name of the validation or test set")
    parser.add_argument("--text", action="store_true", help="show the text")
    parser.add_argument("--tokens", action="store_true", help="with --json: the token ids")
    parser.add_argument("--export", metavar="FILE", help="write the token ids, [steps, sequences, S+1], as .npy")
    return parser


def main(given: argparse.Namespace) -> dict:
    import numpy as np

    from megatron.config.file_access import keep_inputs
    from megatron.data.corpus.files import pair_files
    from megatron.data.errors import DataError
    from megatron.data.provenance import Provenance, config_file, run_config, step_hash
    from megatron.data.tokenizer import build_tokenizer

    last = given.step if given.to is None else given.to
    if not 0 <= given.step <= last:
        asked = f"{given.step} to {last} are no steps"
        raise DataError("--step, --to", asked, "give --step of at least 0, and --to no smaller")
    config = run_config(given.run)
    provenance = Provenance(config, given.split, given.name, run_left_out(given.run))
    if given.export:
        name = given.export if given.export.endswith(".npy") else f"{given.export}.npy"  # as np.save calls it
        read = [path for source in provenance.plan.sources for path in pair_files(source.file.prefix)]
        keep_inputs([name], [config_file(given.run), *read], "--export")
    tokenizer = build_tokenizer(config.tokenizer) if given.text else None
    steps, arrays = [], []
    for step in range(given.step, last + 1):
        sequences = provenance.step(step, given.rank)
        described = []
        for each in sequences:
            entry = {
                "index": each.index,
                "sample": each.number,
                "rank": each.rank,
                "micro_batch": each.micro_batch,
                "hash": f"{each.hash:016x}",
                "pieces": [asdict(piece) for piece in each.pieces],
            }
            if tokenizer:
                entry["text"] = tokenizer.decode(each.tokens.tolist())
            if given.tokens:
                entry["tokens"] = each.tokens.tolist()
            described.append(entry)
        steps.append({"step": step, "hash": f"{step_hash(sequences):016x}", "sequences": described})
        if given.export:
            arrays.append(np.stack([each.tokens for each in sequences]))
    if given.export:
        if len({each.shape for each in arrays}) > 1:
            raise DataError(
                "--export",
                f"steps {given.step} to {last} have sequences of several lengths (training.sequence_schedule)",
                "export the steps of one stage at a time",
            )
        stacked = np.stack(arrays)
        np.save(given.export, stacked.astype(np.uint16) if stacked.max() < 2**16 else stacked.astype(np.int32))
    return {"run": given.run, "split": given.split, "rank": given.rank, "steps": steps, "export": given.export}


def show(result: dict) -> None:
    for step in result["steps"]:
        print(f"step {step['step']}: {len(step['sequences'])} sequences, hash {step['hash']}")
        for each in step["sequences"]:
            print(
                f"  sequence {each['index']} (sample {each['sample']}, rank {each['rank']}, "
                f"micro-batch {each['micro_batch']}), hash {each['hash']}"
            )
            for piece in each["pieces"]:
                last = piece["start"] + piece["length"] - 1
                place = f"{piece['source']} document {piece['document']} tokens {piece['start']}-{last}"
                if piece["input"] is not None:
                    end = piece["input_start"] + piece["input_length"] - 1
                    place += f" = {piece['input']} {piece['unit']} {piece['input_start']}-{end}"
                print(f"    {place}")
            if "text" in each:
                print("    | " + each["text"].replace("\n", "\n    | "))
    if result["export"]:
        print(f"token ids are in {result['export']}")


if __name__ == "__main__":
    sys.exit(run_tool(options(), main, show))
