"""Export a checkpoint of any layout as a folder that transformers opens, and verify the conversion."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from megatron.config import Config, config_hash
from megatron.config.arithmetic.batches import batches_of
from megatron.data.errors import DataError
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.model.costs.describe import totals
from megatron.model.stack import Model, ModelPlan, build_model
from megatron.parallel.layers.parameters import logical_of, stored_tensors
from megatron.parallel.layout.mesh import Mesh

from ..format.durable import new_folder
from ..format.errors import CheckpointError
from ..format.fragment import MASTER, WEIGHT, FragmentSpec
from ..read.reader import Checkpoint, config_of
from .architecture import Architecture
from .companions import (
    GENERATION,
    IDS,
    Companions,
    differing,
    least_version,
    make_readable,
    real_texts,
    shorter,
    write_tokenizer,
)
from .config import hf_config
from .convert import REWARD, further_copies, further_tensors, plan, shapes_of, write_tensors


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
        "global batch": f"{batches_of(config)} samples" if config.training.global_batch_size else None,
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
    task = "text-classification" if REWARD in checkpoint.tensors else "text-generation"
    head = "\n".join(["---", "library_name: transformers", f"pipeline_tag: {task}", "---"])
    return (
        f"{head}\n\n# {config.run.name}\n{notes}\n| | |\n|---|---|\n{rows}\n\n"
        f"```json\n{json.dumps({'layers': config.model.layers}, indent=2)}\n```\n"
    )


TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIBIBYTE = 2**30


def tensor_reader(
    checkpoint: Checkpoint, dtype: torch.dtype | dict[str, torch.dtype] | None
) -> Callable[[str], torch.Tensor]:
    """A function that gives a logical tensor by name. fp32 comes from the masters.

    Args:
        dtype: of all tensors, or of each. None: as stored.
    """

    def read(name: str) -> torch.Tensor:
        tensor, wanted = checkpoint.tensors[name], dtype[name] if isinstance(dtype, dict) else dtype
        return checkpoint.read(FragmentSpec.whole(tensor, WEIGHT), wanted).data.view(tensor.shape)

    return read


def _types_of(checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    stored = checkpoint.stored
    found = {name: stored.get((name, WEIGHT)) or stored.get((name, MASTER)) for name in checkpoint.tensors}
    return {name: dtype for name, dtype in found.items() if dtype is not None}


def type_of(checkpoint: Checkpoint) -> torch.dtype:
    """The type of most elements of the weights, as the run used them."""
    sizes = Counter[torch.dtype]()
    for name, dtype in _types_of(checkpoint).items():
        sizes[dtype] += torch.Size(checkpoint.tensors[name].shape).numel()
    if not sizes:
        raise CheckpointError(checkpoint.path, "it has no weights")
    return max(sizes, key=sizes.__getitem__)


@dataclass(frozen=True)
class Exported:
    """A finished export, with notes for the user."""

    folder: Path
    model_type: str
    class_name: str
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
    """Write the model of a checkpoint as a Hugging Face folder. Only one module's tensors are in memory.

    Args:
        out: the folder, which must not exist. It appears complete or not at all.
        name: model_type to write. None: the first that can express the model.
        dtype: one of TYPES. None keeps each weight's own type.
        limit: bytes of one file of weights.

    Raises:
        CheckpointError: the model cannot be expressed (with the options in the way), tensors do not fit, `out` exists.
    """
    if out.exists():
        raise CheckpointError(out, "it exists already")
    config = config_of(checkpoint)
    if ModelPlan(config, Mesh.single()).whole:
        return _export_whole(checkpoint, config, out, name, dtype, limit)
    kept = Companions.of(checkpoint.meta.extra, checkpoint.path)
    same = kept is not None and kept.same_tokenizer(config.tokenizer)
    architecture, theirs = hf_config(config, name, kept, ids=same)
    if kept is not None and kept.model_type != architecture.name:
        kept, same = None, False
    if REWARD in checkpoint.tensors:
        scorer = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(architecture.name)
        if scorer is None:
            rule = f"transformers has no class of {architecture.name} with one output, as which a reward model opens"
            raise CheckpointError(out, rule)
        theirs.architectures, theirs.num_labels = [scorer], 1
    wanted = TYPES[dtype] if dtype else type_of(checkpoint)
    if kept is None or str(wanted) != f"torch.{kept.dtype}":
        theirs.dtype = wanted
    shapes = {key: tensor.shape for key, tensor in checkpoint.tensors.items() if checkpoint.has_weights(key)}
    left_out = [] if architecture.keeps_further(config.model) else further_tensors(shapes, config.model)
    shapes = {key: shape for key, shape in shapes.items() if key not in set(left_out)}
    steps = plan(architecture, shapes, config.model)
    if not left_out:
        steps += further_copies(architecture, steps, config.model)
    types = dict.fromkeys(shapes, wanted) if dtype else _types_of(checkpoint)
    for step in steps:  # tensors that are joined have one type: the widest loses nothing
        types |= dict.fromkeys(
            step.ours,
            torch.float32 if step.form.whole else reduce(torch.promote_types, [types[name] for name in step.ours]),
        )
    with new_folder(out) as draft:
        files = []
        for file in write_tensors(draft, shapes_of(steps, shapes, types), tensor_reader(checkpoint, types), limit):
            progress(file)
            files.append(file)
        notes = _beside(draft, config, theirs, kept, same)
        notes += _unskipped(theirs, config) if REWARD in checkpoint.tensors else []
        version, reason = least_version(architecture, config.model)
        notes += [f"needs transformers {version}: {reason}"] if reason else []
        notes += [f"skipped: {len(left_out)} tensors of modules that predict further tokens"] if left_out else []
        theirs.save_pretrained(draft)
        make_readable(draft, architecture)
        notes += _tokenizer_notes(draft, config)
        (draft / "README.md").write_text(model_card(checkpoint, config, architecture, wanted), encoding="utf-8")
    return Exported(out, architecture.name, architecture.class_name, wanted, files, notes)


def _export_whole(
    checkpoint: Checkpoint, config: Config, out: Path, name: str | None, dtype: str | None, limit: int
) -> Exported:
    """`export` of a model that is a class of transformers, by its `save_pretrained`: all of it in memory, in fp32."""

    if name is not None:
        raise CheckpointError(out, f"the model is a class of transformers already: remove --architecture {name}")
    if REWARD in checkpoint.tensors:
        raise CheckpointError(out, "a reward model that is a class of transformers cannot be exported: score with it")
    wanted, read = TYPES[dtype] if dtype else type_of(checkpoint), tensor_reader(checkpoint, torch.float32)
    model: Any = build_model(config, dtype=torch.float32, values=False)
    with torch.no_grad():
        for tensor in stored_tensors(model):
            tensor.copy_(read(logical_of(tensor).name))
    theirs = model.as_saved(wanted)
    kind = theirs.config.model_type
    with new_folder(out) as draft:
        ids, notes = write_tokenizer(draft, config.tokenizer, kind, config.training.sequence_length)
        for name, value in ids.items():
            for settings in (theirs.config, theirs.generation_config):
                if value is not None and settings is not None:
                    setattr(settings, name, value)
        theirs.save_pretrained(draft, max_shard_size=limit)
    files = sorted(each.name for each in out.glob("*.safetensors"))
    return Exported(out, kind, type(theirs).__name__, wanted, files, notes)


def _beside(draft: Path, config: Config, theirs: PreTrainedConfig, kept: Companions | None, same: bool) -> list[str]:
    """Write the tokenizer and the generation settings, and set the configuration's special ids.

    Args:
        kept: companions of the imported model, or None if it had another architecture.
        same: whether the run reads the tokenizer of the imported model.
    """
    length = config.training.sequence_length
    if kept is not None and same:
        if kept.generation is not None:
            (draft / GENERATION).write_text(json.dumps(kept.generation, indent=2) + "\n", encoding="utf-8")
        lost = kept.copy_tokenizer(draft)
        notes = [*kept.changed(theirs), *shorter(draft, length), *_beyond(theirs)]
        if lost or not kept.files:
            notes += write_tokenizer(draft, config.tokenizer, theirs.model_type, length)[1]
        if lost:
            notes.append(f"gone from {kept.folder}, or changed since the import: {', '.join(lost)}")
        return notes
    ids, notes = write_tokenizer(draft, config.tokenizer, theirs.model_type, length)
    for name, value in ids.items():
        setattr(theirs, name, value)
    GenerationConfig(**ids, max_length=length).save_pretrained(draft)
    if kept is None:
        return notes
    gone = ", ".join([*IDS, *([GENERATION] if kept.generation is not None else []), *kept.files])
    return [
        *notes,
        f"the run reads another tokenizer than the imported model, or its file is gone. Not kept: {gone}",
        *(line for line in kept.changed(theirs) if not line.startswith(IDS)),
    ]


def _unskipped(theirs: PreTrainedConfig, config: Config) -> list[str]:
    """Have transformers read a reward model's value at the end of a document. It takes `pad_token_id` for filler."""
    ends = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    pad = theirs.pad_token_id
    if pad is None or pad not in (*ends, config.tokenizer.eod_id):
        return []
    theirs.pad_token_id = None
    return [f"pad_token_id={pad} is removed, as it ends documents, where values are read: batches need another filler"]


def _beyond(theirs: PreTrainedConfig) -> list[str]:
    """A note on special ids without a row in the embedding, which transformers takes from defaults of a class."""
    notes, size = [], theirs.vocab_size
    for name in IDS:
        ids = getattr(theirs, name, None)
        if any(isinstance(each, int) and each >= size for each in (ids if isinstance(ids, list) else [ids])):
            notes.append(f"{name}={ids!r:.80} is beyond the vocabulary of {size} ids, as in the imported model")
    return notes


def _tokenizer_notes(draft: Path, config: Config) -> list[str]:
    if config.tokenizer.type == "none" or not (draft / "tokenizer_config.json").is_file():
        return []
    try:
        found = differing(draft, build_tokenizer(config.tokenizer))
    except DataError as error:
        return [f"the tokenizer was not compared: {error}"]
    return [found] if found else []


ROUNDING = 2.0**-23  # largest relative change by one rounding to fp32
# Two programs of one function round each number several times, in different orders. The change of the logits when every
# weight is rounded once more is multiplied by this. Models in the tests need half of it.
ROUNDINGS = 16


@dataclass(frozen=True)
class Proof:
    """Comparison of two models and their tokenizers."""

    difference: float  # largest difference of two logits
    largest: float
    rounding: float  # largest change of a logit if every weight is rounded once more
    same_choice: bool  # whether all likeliest next tokens are the same
    tokenizer: str | None = None  # the tokenizers' difference, "" without one, None without two tokenizers

    @property
    def relative(self) -> float:
        return self.difference / self.largest if self.largest else self.difference

    @property
    def bound(self) -> float:
        return ROUNDINGS * self.rounding / self.largest if self.largest else 0.0

    @property
    def holds(self) -> bool:
        """Whether the difference is fp32 rounding, and the texts' ids are equal."""
        return self.relative <= self.bound and not self.tokenizer

    @property
    def values(self) -> dict[str, float | str | bool | None]:
        """For JSON."""
        own = {"difference": self.difference, "relative": self.relative, "bound": self.bound}
        return {**own, "tokenizer": self.tokenizer, "verified": self.holds}

    def __str__(self) -> str:
        choice = "the same" if self.same_choice else "NOT the same"
        ids = {None: "no tokenizer to compare", "": f"the same ids of {len(real_texts())} texts"}
        return (
            f"{'verified' if self.holds else 'NOT verified'}: largest logit difference {self.difference:.3g} (relative "
            f"to the largest logit {self.relative:.3g}, at most {self.bound:.3g} by rounding). The likeliest next "
            f"tokens are {choice}, and {ids.get(self.tokenizer, self.tokenizer)}"
        )


def prove(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None, *, tokens: int = 64, seed: int = 0) -> Proof:
    """Run our model with the checkpoint's weights and transformers' with the folder's, both in fp32.

    Args:
        dtype: type of the exchanged weights, to which both models' values are rounded. None: each stored type.
        tokens: length of the two samples: random ids, and a text if the run has a tokenizer.
    """
    config = config_of(checkpoint)
    tokenizer = _tokenizer(config)
    model = build_model(config, dtype=torch.float32, values=False).eval()
    read = tensor_reader(checkpoint, dtype)
    with torch.no_grad():
        for tensor in stored_tensors(model):
            tensor.copy_(read(logical_of(tensor).name))
        theirs = _load(folder, scores=model.head.value is not None)
        ids = _samples(config, tokenizer, min(tokens, config.training.sequence_length), seed)
        ours = _outputs(model, ids)
        wanted = torch.cat([theirs(row[None], use_cache=False).logits.float() for row in ids])
        del theirs
        generator = torch.Generator().manual_seed(seed)
        for tensor in stored_tensors(model):
            tensor.mul_(1 + ROUNDING * (2 * torch.randint(2, tensor.shape, generator=generator) - 1))
        rounding = (_outputs(model, ids) - ours).abs().max().item()
    return Proof(
        (ours - wanted).abs().max().item(),
        wanted.abs().max().item(),
        rounding,
        ours.argmax(-1).equal(wanted.argmax(-1)),
        None if tokenizer is None or not _has_tokenizer(folder) else differing(folder, tokenizer),
    )


def _outputs(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """Logits [2, S, V], or a reward model's value [2, 1] of a text."""
    if model.head.value is None:
        return model.logits(ids)
    return model.head.values_at(model.head.read(model.stream(ids)))[:, -1:]


def _tokenizer(config: Config) -> Tokenizer | None:
    try:
        return build_tokenizer(config.tokenizer) if config.tokenizer.type != "none" else None
    except DataError:
        return None


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def _samples(config: Config, tokenizer: Tokenizer | None, length: int, seed: int) -> torch.Tensor:
    """Ids [2, length]."""
    size = config.model.vocab_size
    ids = torch.randint(size, (2, length), generator=torch.Generator().manual_seed(seed))
    text = tokenizer.encode("\n".join(real_texts()[:10]))[:length] if tokenizer is not None else []
    if len(text) == length and max(text) < size:
        ids[1] = torch.tensor(text)
    return ids


def _load(folder: Path, scores: bool = False) -> torch.nn.Module:
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which warns of libraries for GPUs
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
    try:
        kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        found = kind.from_pretrained(folder, dtype=torch.float32).eval()
        if scores:
            found.config.pad_token_id = None  # the value is that of the last token
        return found
    except Exception as error:
        raise CheckpointError(folder, f"transformers cannot load it: {error!r:.1000}") from error
