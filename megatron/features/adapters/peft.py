"""Adapters in the files of Hugging Face's peft: `adapter_config.json` and `adapter_model.safetensors`.

A form (`kinds/common/links.py`) moves the rows of matrices between our names and theirs. It moves the rows of B alike,
and A stays: peft's matrix of joined ones has the rows of all their A. Which rows come from which matrix is found by a
second pass of the form, over matrices of ones.

Shapes: N outputs and K inputs of a matrix, r its rank."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint import MASTER, Checkpoint, CheckpointError, FragmentSpec, Meta, write_tensors
from megatron.checkpoint.format.durable import new_folder
from megatron.checkpoint.hf.companions import Companions
from megatron.checkpoint.hf.config import hf_config
from megatron.checkpoint.hf.convert import ConversionStep, plan
from megatron.checkpoint.read.reader import ADAPTERS
from megatron.config import Config
from megatron.config.file_access import read_json
from megatron.kinds.common.links import SAME, Form
from megatron.parallel.layout.shard import LogicalTensor, Role

from .merging import adapted_layers, whole, with_adapters
from .options import AdapterSection, adapter_of
from .part import MAGNITUDE, A, B

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_PLAIN = re.compile(r"(?:\\\.|[\w.-])+")  # dots may be escaped, and stand for any character if not, as peft reads them
_NAME = re.compile(r"base_model\.model\.(.+?)\.(?:lora_(A|B)\.weight|lora_(magnitude_vector)(?:\.weight)?)")


@dataclass(frozen=True)
class Factors:
    """An adapter of one matrix, or of rows of one."""

    source: int  # which of the form's tensors it belongs to, and `first` row there
    first: int
    a: Tensor  # a, b: [r, K] and [N, r]
    b: Tensor
    lengths: Tensor | None = None  # [N] of DoRA


def carried(
    move: Callable[[list[Tensor]], list[Tensor]], sizes: Sequence[int], factors: Sequence[Factors]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Move the rows of factors by a form.

    Args:
        sizes: rows of the tensors that the form takes.

    Returns:
        Of each tensor that it gives: B [N, R] with the columns of all factors, whether an element may be other than 0,
        and lengths [N].
    """
    widths = [each.b.shape[1] for each in factors]
    values = [torch.zeros(size, sum(widths)) for size in sizes]
    marks, lengths = [torch.zeros_like(each) for each in values], [torch.zeros(size, 1) for size in sizes]
    begin = 0
    for each, width in zip(factors, widths):
        rows = slice(each.first, each.first + each.b.shape[0])
        values[each.source][rows, begin : begin + width] = each.b
        marks[each.source][rows, begin : begin + width] = 1.0
        if each.lengths is not None:
            lengths[each.source][rows, 0] = each.lengths
        begin += width
    moved = zip(move(values), move(marks), move(lengths), strict=True)
    return [(value, mark > 0, length.squeeze(1)) for value, mark, length in moved]


def _rows(step: ConversionStep, base: Checkpoint) -> Form:
    """The step's form of matrices [N, K] on both sides. GPT-2's Conv1D has [K, N] there, peft [N, K]."""
    form = step.form
    shown = form.to_hf([torch.empty(base.tensors[name].shape[0], 1) for name in step.ours])
    if shown[0].shape[0] > 1:
        return form

    def turned(tensors: list[Tensor]) -> list[Tensor]:
        return [each.T for each in tensors]

    return Form(lambda ours: turned(form.to_hf(ours)), lambda theirs: form.from_hf(turned(theirs)))


def steps_of(base: Checkpoint, config: Config) -> list[ConversionStep]:
    """Steps between the tensors of the base and of transformers' model.

    Raises:
        CheckpointError: transformers has no such model.
    """
    names = [name for name in base.tensors if base.has_weights(name)]
    if config.model.is_whole:
        return [ConversionStep((name,), (name,), SAME) for name in names]
    kept = Companions.of(base.meta.extra, base.path)
    architecture, _ = hf_config(config, None, kept)
    return plan(architecture, names, config.model)


# -- export ------------------------------------------------------------------------------------------------------------


def to_peft(
    adapters: Checkpoint, base: Checkpoint, config: Config, out: Path, base_name: str | None = None
) -> list[str]:
    """Write a folder that peft opens. Returns the names of the adapted modules.

    Raises:
        CheckpointError: transformers has no such model, a form mixes columns, or `out` exists.
    """
    if out.exists():
        raise CheckpointError(out, "it exists already")
    options, layers = adapter_of(config), set(adapted_layers(adapters))
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for step in steps_of(base, config):
        ours = [name.removesuffix(".weight") for name in step.ours]
        if not layers.isdisjoint(ours):
            sizes = [base.tensors[name].shape[0] for name in step.ours]
            found = [
                each
                for n, layer in enumerate(ours)
                for each in (_factors(adapters, base, layer, n, options) if layer in layers else _plain(base, layer, n))
            ]
            shown = carried(_rows(step, base).to_hf, sizes, found)
            _check_columns(step, base, found, shown)
            for name, moved in zip(step.theirs, shown, strict=True):
                module = name.removesuffix(".weight")
                ranks[module] = _write(tensors, module, moved, found, options)
    ranks = {module: rank for module, rank in ranks.items() if rank}
    _save(out, tensors, _config(options, ranks, base_name))
    return sorted(ranks)


def _factors(adapters: Checkpoint, base: Checkpoint, layer: str, source: int, options: AdapterSection) -> list[Factors]:
    """Of each of the matrices that are fused in a layer, without the ones whose product stays 0."""
    found = [whole(adapters, adapters.tensors[f"{layer}.{end}"], torch.float32) for end in (A, B)]
    lengths = None
    if f"{layer}.{MAGNITUDE}" in adapters.tensors:
        lengths = whole(adapters, adapters.tensors[f"{layer}.{MAGNITUDE}"], torch.float32)
    tensor, made, first = base.tensors[f"{layer}.weight"], [], 0
    sizes = list(tensor.matrices or tensor.shape[:1])
    for a, b in zip(found[0].split(options.rank), found[1].split(sizes), strict=True):
        own = None if lengths is None else lengths[first : first + b.shape[0]]
        if a.any() or b.any() or own is not None:
            made.append(Factors(source, first, a, b, own))
        first += b.shape[0]
    return made


def _plain(base: Checkpoint, layer: str, source: int) -> list[Factors]:
    """Of a layer without an adapter, whose rows keep their lengths where others of its module have DoRA's."""
    rows = whole(base, base.tensors[f"{layer}.weight"], torch.float32)
    return [Factors(source, 0, rows[:0], rows[:, :0], _lengths(rows))]


def _lengths(rows: Tensor) -> Tensor:
    return rows.double().square().sum(1).sqrt().float()


def _write(
    tensors: dict[str, Tensor],
    module: str,
    moved: tuple[Tensor, Tensor, Tensor],
    factors: Sequence[Factors],
    options: AdapterSection,
) -> int:
    """Add the tensors of one of peft's modules. Returns its rank, or 0."""
    b, mark, lengths = moved
    a = torch.cat([each.a for each in factors]) if factors else b.new_zeros(0, 0)
    used = mark.any(0)
    if not used.any():
        return 0
    tensors[f"{PREFIX}{module}.lora_A.weight"] = a[used].contiguous()
    tensors[f"{PREFIX}{module}.lora_B.weight"] = b[:, used].contiguous()
    if options.type == "dora":
        tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = lengths.contiguous()
    return int(used.sum())


def _check_columns(
    step: ConversionStep, base: Checkpoint, factors: Sequence[Factors], moved: Sequence[tuple[Tensor, ...]]
) -> None:
    """Compare B A after the form moved B's rows with the form's result of B A."""
    shapes = [base.tensors[name].shape for name in step.ours]
    whole_ones = [torch.zeros(shape) for shape in shapes]
    for each in factors:
        whole_ones[each.source][each.first : each.first + each.b.shape[0]] = each.b @ each.a
    a = torch.cat([each.a for each in factors]) if factors else torch.zeros(0, shapes[0][1])
    for name, wanted, (b, *_) in zip(step.theirs, _rows(step, base).to_hf(whole_ones), moved, strict=True):
        if wanted.shape != (b.shape[0], a.shape[1]) or not torch.allclose(b @ a, wanted, rtol=1e-4, atol=1e-6):
            raise CheckpointError(name, "its columns have another order here: merge the adapters instead")


def _config(options: AdapterSection, ranks: Mapping[str, int], base_name: str | None) -> dict[str, Any]:
    root: Callable[[float], float] = sqrt if options.rslora else float
    alphas = {module: options.scale * root(rank) for module, rank in ranks.items()}
    others = [module for module, rank in ranks.items() if rank != options.rank]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "use_rslora": options.rslora,
        "use_dora": options.type == "dora",
        "target_modules": sorted(ranks),
        "rank_pattern": {re.escape(module): ranks[module] for module in others},
        "alpha_pattern": {re.escape(module): alphas[module] for module in others},
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _save(out: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    with new_folder(out) as draft:
        save_file(tensors, draft / WEIGHTS, metadata={"format": "pt"})
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# -- import ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Foreign:
    """An adapter of peft: the options that stand for it here, and its tensors by module."""

    options: dict[str, Any]
    modules: dict[str, Factors]


def read_peft(folder: Path) -> Foreign:
    """The files of a folder, compared with each other.

    Raises:
        CheckpointError: they are missing or damaged, or have what no adapter here has.
    """
    try:
        config = read_json(folder / CONFIG)
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(folder, f"its {CONFIG} or {WEIGHTS} cannot be read: {error}") from error
    options, problems = _options(config)
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or not tensor.is_floating_point() or tensor.dim() != (1 if match[3] else 2):
            problems.append(f"{name:.200} must be lora_A or lora_B of a linear layer, or its magnitudes")
        elif not tensor.float().isfinite().all():
            problems.append(f"{name} must have finite values only")
        else:
            found.setdefault(match[1], {})[match[2] or "m"] = tensor.float()
    wanted = {"A", "B", "m"} if options["type"] == "dora" else {"A", "B"}
    modules = {}
    for module, own in found.items():
        fits = own.keys() == wanted and 0 < own["A"].shape[0] == own["B"].shape[1]
        if not fits or ("m" in own and own["m"].shape[0] != own["B"].shape[0]):
            problems.append(f"{module} must have {' and '.join(sorted(wanted))}, of one rank")
            continue
        modules[module] = Factors(0, 0, own["A"], own["B"], own.get("m"))
    if problems or not modules:
        raise CheckpointError(folder, problems or ["it has no adapters of linear layers"])
    rank = max(each.a.shape[0] for each in modules.values())
    scales = {module: _scale(config, module, each.a.shape[0]) for module, each in modules.items()}
    scale = next(iter(scales.values()))
    for module, own_scale in scales.items():
        if own_scale != scale:
            modules[module] = replace(modules[module], b=modules[module].b * (own_scale / scale))
    return Foreign({**options, "rank": rank, "alpha": scale * rank, "rslora": False}, modules)


def _options(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Type and dropout, and what is wrong with the rest."""
    if not isinstance(config, dict):
        return {"type": "lora"}, [f"{CONFIG} must be a mapping"]
    needed: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("modules_to_save", "target_parameters", "trainable_token_indices"), (None, [])),
        **dict.fromkeys(("lora_bias", "use_qalora"), (False, None)),
        **dict.fromkeys(("layer_replication", "alora_invocation_tokens"), (None,)),
        **{"peft_type": ("LORA",), "bias": ("none", None)},
    }
    wrong = [
        f"{name} must be {allowed[0]}"
        for name, allowed in needed.items()
        if config.get(name, allowed[0]) not in allowed
    ]
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(_PLAIN.fullmatch(each) for each in patterns):
        return {"type": "lora"}, [*wrong, "alpha_pattern must have names of modules, and a number for each"]
    numbers = [config.get("r"), config.get("lora_alpha"), *patterns.values()]
    if not all(isinstance(each, (int, float)) and not isinstance(each, bool) and 0 < each < 1e9 for each in numbers):
        wrong.append("r and lora_alpha must be numbers above 0, and so must each of alpha_pattern")
    return {"type": "dora" if config.get("use_dora") else "lora"}, wrong


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Of the product of a module's matrices, as peft computes it."""
    alpha = config["lora_alpha"]
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = own
            break
    return float(alpha) / (sqrt(rank) if config.get("use_rslora") else rank)


def from_peft(folder: Path, base: Checkpoint, config: Config, base_hash: str, out: Path) -> dict[str, Any]:
    """Write the adapters of a folder as a checkpoint that `adapter.initialize_from` takes.

    Matrices that are fused here and not all adapted there have zeros for the others, which stay zero.

    Returns:
        The section `adapter` of a run with them.

    Raises:
        CheckpointError: they do not fit the model.
    """
    if out.exists():
        raise CheckpointError(out, "it exists already")
    foreign = read_peft(folder)
    rank, left = foreign.options["rank"], dict(foreign.modules)
    tensors: dict[str, tuple[LogicalTensor, Tensor]] = {}
    for step in steps_of(base, config):
        modules = [name.removesuffix(".weight") for name in step.theirs]
        if left.keys().isdisjoint(modules):
            continue
        if any(len(base.tensors[name].shape) != 2 for name in step.ours):
            raise CheckpointError(folder, f"{modules[0]} must be a linear layer, and is none")
        form = _rows(step, base)
        shown = form.to_hf([torch.empty(base.tensors[name].shape[0], 1) for name in step.ours])
        sizes = [each.shape[0] for each in shown]
        found = [_placed(left.pop(module), n, sizes[n], module) for n, module in enumerate(modules) if module in left]
        moved = carried(form.from_hf, sizes, found)
        for name, each in zip(step.ours, moved, strict=True):
            tensors |= _ours(base, name, each, found, rank, foreign.options["type"])
    if left:
        raise CheckpointError(folder, [f"the model has no {module:.200}" for module in sorted(left)])
    targets = sorted({name.partition(".adapter.")[0] for name in tensors})
    section = {**foreign.options, "targets": targets, "initialize_from": str(out)}
    names = sorted(tensors)
    items = [(FragmentSpec.whole(tensors[name][0], MASTER), torch.float32) for name in names]
    own = AdapterSection(**{**section, "initialize_from": None})
    text = with_adapters(config, own, config.checkpoint.initialize_from)
    meta = Meta(0, config=text, resumable=False, extra={**base.meta.extra, ADAPTERS: {"base": base_hash}})
    write_tensors(out, items, lambda number: [tensors[names[number]][1].flatten()], meta)
    return section


def _placed(own: Factors, source: int, rows: int, module: str) -> Factors:
    if own.b.shape[0] != rows:
        raise CheckpointError(module, f"its B has {own.b.shape[0]} rows, and the layer has {rows} outputs")
    return Factors(source, 0, own.a, own.b, own.lengths)


def _ours(
    base: Checkpoint, name: str, moved: tuple[Tensor, Tensor, Tensor], found: Sequence[Factors], rank: int, kind: str
) -> dict[str, tuple[LogicalTensor, Tensor]]:
    """The adapter's tensors of one of our layers."""
    tensor, (b, mark, lengths) = base.tensors[name], moved
    if not mark.any():
        return {}
    layer, (outputs, inputs) = name.removesuffix(".weight"), tensor.shape
    a, parts = torch.cat([each.a for each in found]), tuple(tensor.matrices or (outputs,))
    if a.shape[1] != inputs:
        raise CheckpointError(layer, f"its A has {a.shape[1]} columns, and the layer has {inputs} inputs")
    of_a, of_b = torch.zeros(len(parts) * rank, inputs), torch.zeros(outputs, rank)
    for number, (rows, own) in enumerate(zip(torch.arange(outputs).split(list(parts)), mark.split(list(parts)))):
        used = own.any(0)
        if own.any() and not own[:, used].all():
            raise CheckpointError(layer, "its rows belong to several adapters, and here to one: merge them first")
        width = int(used.sum())
        of_a[number * rank : number * rank + width] = a[used]
        of_b[rows, :width] = b[rows][:, used]
    if kind == "dora":  # of rows that are not adapted: their own
        lengths = torch.where(mark.any(1), lengths, _lengths(whole(base, tensor, torch.float32)))
    made = {A: of_a, B: of_b, **({MAGNITUDE: lengths} if kind == "dora" else {})}
    return {
        f"{layer}.{end}": (LogicalTensor(f"{layer}.{end}", tuple(each.shape), Role.HIDDEN), each)
        for end, each in made.items()
    }
