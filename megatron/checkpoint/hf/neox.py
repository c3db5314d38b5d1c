"""GPT-NeoX's own checkpoints (`layer_XX-model_YY-model_states.pt`) as a Hugging Face folder.

Each pipeline layer is a file per tensor parallel rank. Column-parallel matrices are cut along rows, row-parallel ones
along columns. Rows of query_key_value are ordered by head ([n, 3, D]) on every rank, as in GPTNeoXForCausalLM, so
shards below each other are the whole. Layers are recognised by what they hold, not by their numbers, among which are
layers without parameters; version 2 later renamed the matrices of the MLP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.config import Config, load
from megatron.config.paths import UnsafeName, inside

from ..errors import CheckpointError
from ..pickles import load_tensors
from .architectures import GPT_NEOX
from .config import hf_config
from .written import INDEX

FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RENAMED = {"mlp.linear1.": "mlp.dense_h_to_4h.", "mlp.linear2.": "mlp.dense_4h_to_h."}
ROWS = (
    "word_embeddings.weight",
    "final_linear.weight",
    "attention.query_key_value.weight",
    "attention.query_key_value.bias",
    "mlp.dense_h_to_4h.weight",
    "mlp.dense_h_to_4h.bias",
)
COLUMNS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
OUTPUT_BIASES = ("attention.dense.bias", "mlp.dense_4h_to_h.bias")
NORMS = tuple(
    f"{norm}.{part}" for norm in ("input_layernorm", "post_attention_layernorm", "norm") for part in ("weight", "bias")
)
BUFFERS = ("attention.rotary_emb.inv_freq", "attention.masked_bias", "attention.bias")
OUTSIDE = {
    "word_embeddings.": "gpt_neox.embed_in.",
    "norm.": "gpt_neox.final_layer_norm.",
    "final_linear.": "embed_out.",
}


def layers_of(folder: Path) -> dict[int, list[Path]]:
    """The files of each layer, by rank.

    Raises:
        CheckpointError: there are none, or a rank's file is lost.
    """
    found: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else []:
        if match := FILE.fullmatch(path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = _checked(folder, path.name)
    if not found:
        raise CheckpointError(
            folder,
            "it has no layer_XX-model_YY-model_states.pt; give the global_stepN folder of a "
            "run with pipe_parallel_size of at least 1",
        )
    ranks = max(rank for files in found.values() for rank in files) + 1
    lost = [
        f"layer_{layer:02d}-model_{rank:02d}-model_states.pt is lost"
        for layer, files in sorted(found.items())
        for rank in range(ranks)
        if rank not in files
    ]
    if lost:
        raise CheckpointError(folder, lost)
    return {layer: [files[rank] for rank in range(ranks)] for layer, files in sorted(found.items())}


def _checked(folder: Path, name: str) -> Path:
    try:
        return inside(folder, name)
    except UnsafeName as error:
        raise CheckpointError(folder, str(error)) from error


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, under their first names. No code in it is run.

    Raises:
        CheckpointError: it is damaged, or has anything but tensors.
    """
    values = load_tensors(path)
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise CheckpointError(path, "it has something other than tensors")
    return {_first_name(name): value for name, value in values.items() if name not in BUFFERS}


def _first_name(name: str) -> str:
    for new, old in RENAMED.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def merge(name: str, shards: list[Tensor], parallel_residual: bool, say: Callable[[str], None]) -> Tensor:
    """One tensor from its shards.

    Every rank has all of an output bias. With the parallel residual each adds its own before the sum over the ranks, so
    that the sum is what the model computes with; otherwise one is added after it. Norms (and such a bias) should be the
    same on all ranks; where training let them drift, their mean is taken, as GPT-NeoX's own converter does, and said.

    Raises:
        KeyError: no such tensor is known.
    """
    if name in ROWS:
        return torch.cat(shards)
    if name in COLUMNS:
        return torch.cat(shards, dim=1)
    if name in OUTPUT_BIASES and parallel_residual:
        return torch.stack([shard.float() for shard in shards]).sum(0).to(shards[0].dtype)
    if name not in NORMS + OUTPUT_BIASES:
        raise KeyError(name)
    if all(shard.equal(shards[0]) for shard in shards):
        return shards[0]
    values = torch.stack([shard.float() for shard in shards])
    say(f"{name} differs between ranks by up to {(values.amax(0) - values.amin(0)).max():.3g}; their mean was taken")
    return values.mean(0).to(shards[0].dtype)


def configuration(folder: Path, config: Path, vocabulary: int) -> Config:
    """Our configuration of GPT-NeoX's, with the number of rows that its embedding really has."""
    overrides = ["parallel.tensor=1", "parallel.pipeline=1", f"model.vocab_size={vocabulary}"]
    resolved = load([str(config)], overrides, ranks=1, check_inputs=False).config
    held = resolved.model.vocab_size
    if held != vocabulary:
        raise CheckpointError(folder, f"the embedding has {vocabulary} rows, but the configuration makes it {held}")
    return resolved


def to_folder(source: Path, config: Path, out: Path, say: Callable[[str], None] = lambda text: None) -> None:
    """Write a Hugging Face folder; the tensors of one layer are in memory at a time.

    Args:
        source: global_stepN.
        config: GPT-NeoX's YAML, or ours.
        out: an existing empty folder.
        say: hears what was done to tensors that differ between ranks.

    Raises:
        CheckpointError: files are lost or damaged, tensors are unknown, or GPTNeoXForCausalLM cannot express the model.
        ConfigError: the configuration has mistakes.
    """
    layers = layers_of(source)
    first = next(iter(layers.values()))
    embedding = [read(path).get("word_embeddings.weight") for path in first]
    if any(shard is None for shard in embedding):
        raise CheckpointError(first[0], "the first layer should be the embedding, but has no word_embeddings.weight")
    ours = configuration(source, config, sum(len(shard) for shard in embedding))
    architecture, theirs = hf_config(ours, GPT_NEOX.name)
    parallel, block, places, total = ours.model.residual.form == "parallel", 0, {}, 0
    for number, files in enumerate(layers.values()):
        tensors = _layer(files, block, parallel, say)
        block += any(name.startswith("gpt_neox.layers.") for name in tensors)
        again = sorted(set(tensors) & set(places))
        if again:  # a tied head is kept where it is used, too
            _same_embedding(files[0], again, tensors, embedding)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in places}
        if tensors:
            file = f"model-{number:05d}.safetensors"
            save_file(tensors, out / file, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}), encoding="utf-8")
    theirs.save_pretrained(out)


def _layer(files: list[Path], block: int, parallel: bool, say: Callable[[str], None]) -> dict[str, Tensor]:
    """The whole tensors of a layer under their Hugging Face names; those of a block get its number."""
    shards = [read(path) for path in files]
    differing = sorted(set().union(*shards) - set.intersection(*map(set, shards)))
    if differing:
        raise CheckpointError(files[0].parent, [f"{files[0].name}: {name} is not on all ranks" for name in differing])
    made = {}

    def tell(text: str) -> None:
        say(f"{files[0].name}: {text}")

    for name in shards[0]:
        try:
            tensor = merge(name, [shard[name] for shard in shards], parallel, tell)
        except KeyError:
            raise CheckpointError(files[0], f"{name} has no counterpart in {GPT_NEOX.class_name}") from None
        prefix = next((prefix for prefix in OUTSIDE if name.startswith(prefix)), None)
        whole = f"gpt_neox.layers.{block}.{name}" if prefix is None else OUTSIDE[prefix] + name.removeprefix(prefix)
        made[whole] = tensor.contiguous()
    return made


def _same_embedding(file: Path, names: list[str], tensors: dict[str, Tensor], embedding: list[Tensor]) -> None:
    if names != ["gpt_neox.embed_in.weight"] or not tensors[names[0]].equal(torch.cat(embedding)):
        raise CheckpointError(file, [f"{name} is in an earlier layer, too" for name in names])
