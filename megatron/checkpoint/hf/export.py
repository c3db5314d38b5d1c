"""A checkpoint of any layout as a folder that transformers opens."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from megatron.config import Config
from megatron.data.tokenizer import HuggingFaceTokenizer, build_tokenizer

from ..configuration import config_of
from ..format.errors import CheckpointError
from ..format.fragment import MASTER, WEIGHT, FragmentSpec
from ..read.reader import Checkpoint
from .architecture import Architecture
from .card import model_card
from .config import hf_config
from .convert import further_copies, further_tensors, plan
from .versions import least_version, make_readable
from .written import shapes_of, write_tensors

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIBIBYTE = 2**30


def tensor_reader(checkpoint: Checkpoint, dtype: torch.dtype | None) -> Callable[[str], torch.Tensor]:
    """Gives a whole logical tensor by its name, in `dtype` (None: as it is stored); fp32 comes from the masters."""

    def read(name: str) -> torch.Tensor:
        tensor = checkpoint.tensors[name]
        return checkpoint.read(FragmentSpec.whole(tensor, WEIGHT), dtype).data.view(tensor.shape)

    return read


def type_of(checkpoint: Checkpoint) -> torch.dtype:
    """The type of the weights as the run used them: that of most of their elements."""
    sizes: dict[torch.dtype, int] = {}
    for name, tensor in checkpoint.tensors.items():
        dtype = checkpoint.stored.get((name, WEIGHT)) or checkpoint.stored.get((name, MASTER))
        if dtype is not None:
            sizes[dtype] = sizes.get(dtype, 0) + torch.Size(tensor.shape).numel()
    if not sizes:
        raise CheckpointError(checkpoint.path, "it has no weights")
    return max(sizes, key=lambda dtype: sizes[dtype])


@dataclass(frozen=True)
class Exported:
    """What was written: where, as what, in which type, and what is worth saying."""

    folder: Path
    architecture: Architecture
    dtype: torch.dtype
    files: list[str]
    notes: list[str]


def export(
    checkpoint: Checkpoint,
    out: Path,
    *,
    name: str | None = None,
    dtype: str | None = None,
    limit: int = 5 * GIBIBYTE,
    progress: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write the model of a checkpoint as a Hugging Face folder. The tensors of one module are in memory at a time.

    Args:
        out: the folder; must not exist. It appears whole or not at all.
        name: model_type to write; None takes the first that can express the model.
        dtype: one of TYPES; None leaves the type of the weights.
        limit: bytes of one file of weights.

    Raises:
        CheckpointError: the model cannot be expressed (with the options in the way), tensors do not fit, `out` exists.
    """
    if out.exists():
        raise CheckpointError(out, "it exists already")
    config = config_of(checkpoint)
    architecture, theirs = hf_config(config, name)
    wanted = TYPES[dtype] if dtype else type_of(checkpoint)
    theirs.dtype = wanted
    shapes = {key: tensor.shape for key, tensor in checkpoint.tensors.items() if checkpoint.has_weights(key)}
    left_out = [] if architecture.keeps_further(config.model) else further_tensors(shapes, config.model)
    shapes = {key: shape for key, shape in shapes.items() if key not in set(left_out)}
    steps = plan(architecture, shapes, config.model)
    if not left_out:
        steps += further_copies(architecture, steps, config.model)
    draft = out.with_name(f"{out.name}.tmp-{uuid.uuid4().hex[:12]}")
    draft.mkdir(parents=True)
    try:
        files = []
        for file in write_tensors(draft, shapes_of(steps, shapes), wanted, tensor_reader(checkpoint, wanted), limit):
            progress(file)
            files.append(file)
        notes = _write_tokenizer(draft, config, theirs)
        version, reason = least_version(architecture, config.model)
        notes += [f"needs transformers {version}: {reason}"] if reason else []
        notes += [f"left out: {len(left_out)} tensors of modules that predict further tokens"] if left_out else []
        theirs.save_pretrained(draft)
        make_readable(draft, architecture)
        _generation(config, theirs).save_pretrained(draft)
        (draft / "README.md").write_text(model_card(checkpoint, config, architecture, wanted), encoding="utf-8")
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Exported(out, architecture, wanted, files, notes)


def _generation(config: Config, theirs: PreTrainedConfig) -> GenerationConfig:
    return GenerationConfig(eos_token_id=theirs.eos_token_id, max_length=config.training.sequence_length)


def _write_tokenizer(folder: Path, config: Config, theirs: PreTrainedConfig) -> list[str]:
    """The run's tokenizer, where it is a local file of the tokenizers library; sets the configuration's end token."""
    section = config.tokenizer
    if section.type == "none":
        return ["the run has no tokenizer, so none was written"]
    local = Path(section.path) if section.path else None
    file = local / "tokenizer.json" if local is not None and local.is_dir() else local
    if section.type != "huggingface" or file is None or not file.is_file():
        return [
            f"the tokenizer ({section.type} {section.path or ''}) is no local tokenizer.json and was not written; "
            "put its files beside the model"
        ]
    tokenizer = cast(HuggingFaceTokenizer, build_tokenizer(section))
    theirs.eos_token_id = tokenizer.eod_id
    end = None if tokenizer.eod_id is None else tokenizer.backend.id_to_token(tokenizer.eod_id)
    PreTrainedTokenizerFast(
        tokenizer_file=str(file),
        eos_token=end,
        model_max_length=config.training.sequence_length,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return []
