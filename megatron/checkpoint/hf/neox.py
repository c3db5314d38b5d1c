"""GPT-NeoX's own checkpoints: as a Hugging Face folder (weights), or as one of ours to continue from.

Column-parallel matrices are cut along rows, row-parallel ones along columns. Rows of query_key_value are ordered by
head ([n, 3, D]) on every rank, as in GPTNeoXForCausalLM, so the shards are concatenated. `neox_files` reads the
files."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from megatron.config import Resolved, load, to_yaml

from ..format.errors import CheckpointError
from ..format.fragment import MASTER, WEIGHT, FragmentSpec
from ..format.manifest import Meta
from ..save.writer import write_tensors
from .architectures.layernorm import GPT_NEOX
from .config import hf_config
from .convert import INDEX, match, plan
from .importer import logical_tensors
from .neox_files import EMBEDDING, LayerShard, OptimizerStates, Place, layers_of, read_optimizer

ROWS = (
    EMBEDDING,
    "final_linear.weight",
    "attention.query_key_value.weight",
    "attention.query_key_value.bias",
    "mlp.dense_h_to_4h.weight",
    "mlp.dense_h_to_4h.bias",
)
COLUMNS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
OUTPUT_BIASES = ("attention.dense.bias", "mlp.dense_4h_to_h.bias")
NORMS = tuple(f"{n}.{p}" for n in ("input_layernorm", "post_attention_layernorm", "norm") for p in ("weight", "bias"))
OUTSIDE = {
    "word_embeddings.": "gpt_neox.embed_in.",
    "norm.": "gpt_neox.final_layer_norm.",
    "final_linear.": "embed_out.",
}
AXES = ("tensor", "columns", "depth", "pipeline", "context", "folded", "expert", "expert_tensor")
ONE_RANK = [f"parallel.{axis}=1" for axis in AXES]
Log = Callable[[str], None]


def merge(name: str, shards: list[Tensor], parallel_residual: bool, log: Log, state: str = WEIGHT) -> Tensor:
    """One tensor from its shards: a weight, or an optimizer's state of it.

    Every rank has all of an output bias. With the parallel residual each rank adds its own before the sum over ranks,
    so the model computes with the sum of biases. Otherwise one bias is added after it. The gradient of the sum is that
    of each bias, so moments are never summed. Norms (and such a bias) should be equal on all ranks. If training let
    them drift, the mean is taken, as in GPT-NeoX's own converter, and logged.

    Raises:
        KeyError: no such tensor is known.
    """
    if name in ROWS:
        return torch.cat(shards)
    if name in COLUMNS:
        return torch.cat(shards, dim=1)
    if name in OUTPUT_BIASES and parallel_residual and state in (WEIGHT, MASTER):
        return torch.stack([shard.float() for shard in shards]).sum(0).to(shards[0].dtype)
    if name not in NORMS + OUTPUT_BIASES:
        raise KeyError(name)
    if all(shard.equal(shards[0]) for shard in shards):
        return shards[0]
    values = torch.stack([shard.float() for shard in shards])
    what = name if state == WEIGHT else f"{name} ({state})"
    log(f"{what} differs between ranks by up to {(values.amax(0) - values.amin(0)).max():.3g}. Their mean was taken")
    return values.mean(0).to(shards[0].dtype)


@dataclass(frozen=True)
class NeoXCheckpoint:
    """A checkpoint of GPT-NeoX with the configuration of its run."""

    folder: Path
    layers: dict[int, list[LayerShard]]  # the weights, by layer and tensor parallel rank
    places: dict[str, Place]  # position of each tensor, by its Hugging Face name
    resolved: Resolved  # our configuration on one rank
    theirs: PreTrainedConfig  # Hugging Face's
    log: Log

    def whole(self, place: Place, shards: list[Tensor], state: str = WEIGHT) -> Tensor:
        """One tensor from its shards."""
        number, name = place
        parallel = self.resolved.config.model.residual.form == "parallel"
        return merge(name, shards, parallel, lambda text: self.log(f"layer {number}: {text}"), state).contiguous()

    def weights(self, place: Place) -> list[Tensor]:
        return [shard.read()[place[1]] for shard in self.layers[place[0]]]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.weights(next(iter(self.places.values())))[0].dtype


def open_run(folder: Path, config: Sequence[str], log: Log, batch: int | None = None) -> NeoXCheckpoint:
    """Open a checkpoint.

    Args:
        folder: global_stepN.
        config: files of the run's configuration, GPT-NeoX's or ours.
        batch: samples per step. None: the configuration's on one rank.

    Raises:
        CheckpointError: files are missing or damaged, tensors are unknown, or GPTNeoXForCausalLM cannot express the
            model.
        ConfigError: the configuration has mistakes.
    """
    layers = layers_of(folder)
    first = next(iter(layers.values()))
    embedding = [shard.read()[EMBEDDING] for shard in first if EMBEDDING in shard.read()]
    if len(embedding) < len(first):
        raise CheckpointError(first[0].path, f"the first layer should be the embedding, but has no {EMBEDDING}")
    resolved = configuration(folder, config, sum(len(shard) for shard in embedding), batch)
    _, theirs = hf_config(resolved.config, GPT_NEOX.name)
    return NeoXCheckpoint(folder, layers, _places(folder, layers, embedding), resolved, theirs, log)


def configuration(folder: Path, config: Sequence[str], vocabulary: int, batch: int | None = None) -> Resolved:
    """Our configuration of GPT-NeoX's, with the actual number of rows of its embedding."""
    overrides = [*ONE_RANK, f"model.vocab_size={vocabulary}"]
    if batch is not None:
        overrides += [f"training.global_batch_size={batch}", "training.accumulation=null"]
    resolved = load(config, overrides, ranks=1, check_inputs=False)
    held = resolved.config.model.vocab_size
    if held != vocabulary:
        raise CheckpointError(folder, f"the embedding has {vocabulary} rows, but the configuration makes it {held}")
    return resolved


def _places(folder: Path, layers: dict[int, list[LayerShard]], embedding: list[Tensor]) -> dict[str, Place]:
    """Position of each tensor, by its Hugging Face name. Blocks are numbered in their order."""
    found: dict[str, Place] = {}
    problems, block = [], 0
    for number, shards in layers.items():
        tensors = [shard.read() for shard in shards]
        held = Counter(name for each in tensors for name in each)
        differing = sorted(name for name, ranks in held.items() if ranks < len(tensors))
        problems += [f"{shards[0].path.name}: layer {number}'s {name} is not on all ranks" for name in differing]
        names = {_whole_name(name, block): name for name in tensors[0]}
        problems += [
            f"{shards[0].path.name}: {name} has no counterpart in {GPT_NEOX.class_name}"
            for name in names.values()
            if name not in ROWS + COLUMNS + OUTPUT_BIASES + NORMS
        ]
        for again in sorted(set(names) & set(found)):  # a tied head is stored in both layers
            tied = [shard[EMBEDDING] for shard in tensors if EMBEDDING in shard]
            if names[again] != EMBEDDING or not all(map(torch.equal, tied, embedding)):
                problems.append(f"{shards[0].path.name}: {again} is in an earlier layer, too")
        block += any(name.startswith("gpt_neox.layers.") for name in names)
        found = {name: (number, own) for name, own in names.items()} | found
    if problems:
        raise CheckpointError(folder, problems)
    return found


def _whole_name(name: str, block: int) -> str:
    prefix = next((prefix for prefix in OUTSIDE if name.startswith(prefix)), None)
    return f"gpt_neox.layers.{block}.{name}" if prefix is None else OUTSIDE[prefix] + name.removeprefix(prefix)


def to_folder(run: NeoXCheckpoint, out: Path) -> None:
    """Write a Hugging Face folder of the weights. Only one layer's tensors are in memory.

    Args:
        out: an existing empty folder.
    """
    files: dict[str, str] = {}
    total = 0
    for number, layer in enumerate(run.layers):
        own = {name: place for name, place in run.places.items() if place[0] == layer}
        tensors = {name: run.whole(place, run.weights(place)) for name, place in own.items()}
        if tensors:
            file = f"model-{number:05d}.safetensors"
            save_file(tensors, out / file, metadata={"format": "pt"})
            files |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}), encoding="utf-8")
    run.theirs.save_pretrained(out)


def to_checkpoint(folder: Path, config: Sequence[str], out: Path, log: Log) -> tuple[NeoXCheckpoint, Meta]:
    """Write a checkpoint to continue from: masters, optimizer states, step and position in the data.

    Only one tensor is in memory. The masters must round to the weights.

    Raises:
        CheckpointError: as of `open_run`, or states are missing or belong to other weights.
    """
    optimizer = read_optimizer(folder, layers_of(folder))
    iteration, batch = _progress(folder, optimizer)
    run = open_run(folder, config, log, batch)
    _same_model(run, optimizer)
    tensors = logical_tensors(run.resolved)
    steps = plan(GPT_NEOX, tensors, run.resolved.config.model)
    there = match(GPT_NEOX, steps, run.places, read=lambda n: run.whole(run.places[n], run.weights(run.places[n])))
    step_of = {name: step for step in steps for name in step.ours}
    items = [
        (FragmentSpec.whole(tensors[name], state), torch.float32)
        for state in optimizer.states
        for step in steps
        for name in step.ours
    ]

    def whole(name: str, state: str) -> Tensor:
        place = run.places[there[name]]
        shards = optimizer.shards(place, state)
        weights = run.weights(place)
        _fit(run, place, state, shards, weights)
        return run.whole(place, shards, state)

    def values(number: int) -> Iterator[Tensor]:
        spec = items[number][0]
        name, state = spec.tensor.name, spec.state
        made = dict(step_of[name].from_hf(lambda theirs: whole(theirs, state)))
        yield made[name].float().flatten()

    training = run.resolved.config.training
    samples = iteration * training.global_batch_size
    meta = Meta(
        step=iteration,
        config=to_yaml(run.resolved),
        optimizer={"step": optimizer.step},
        loss_scaler=optimizer.scaler,
        data={"samples": samples, "tokens": samples * training.sequence_length},
        extra={"imported": "GPT-NeoX"},
    )
    write_tensors(out, items, values, meta)
    if optimizer.step != iteration:
        log(
            f"{iteration - optimizer.step:g} of {iteration} steps were without an update (overflow of fp16 gradients). "
            "GPT-NeoX's learning rate lags by these steps. Here it follows the step"
        )
    return run, meta


def _progress(folder: Path, optimizer: OptimizerStates) -> tuple[int, int | None]:
    """The run's step and its samples per step (None if unknown)."""
    engine = optimizer.engine
    number = next((engine[key] for key in ("iteration", "total_iters", "global_steps") if key in engine), None)
    if not isinstance(number, int):
        raise CheckpointError(folder, "mp_rank_00_model_states.pt does not say the iteration")
    steps, samples = engine.get("global_steps"), engine.get("global_samples")
    if isinstance(steps, int) and isinstance(samples, int) and steps > 0 and samples % steps == 0:
        return number, samples // steps
    return number, None


def _same_model(run: NeoXCheckpoint, optimizer: OptimizerStates) -> None:
    """Compare the run's own record of its model. Some of it, like the number of heads, shows in no tensor's shape."""
    recorded = optimizer.engine.get("args")
    ours = {
        "num_layers": run.theirs.num_hidden_layers,
        "hidden_size": run.theirs.hidden_size,
        "num_attention_heads": run.theirs.num_attention_heads,
    }
    problems = [
        f"{name} is {recorded[name]!r} in the checkpoint, and {value!r} in the configuration"
        for name, value in ours.items()
        if isinstance(recorded, dict) and recorded.get(name, value) != value
    ]
    if problems:
        raise CheckpointError(run.folder, problems)


def _fit(run: NeoXCheckpoint, place: Place, state: str, shards: list[Tensor], weights: list[Tensor]) -> None:
    """Compare states with weights: equal shapes, and masters that round to the weights.

    Raises:
        CheckpointError: they differ, as in files of different steps or with another order of the parameters.
    """
    for rank, (shard, weight) in enumerate(zip(shards, weights, strict=True)):
        if shard.shape != weight.shape:
            problem = f"is {tuple(shard.shape)}, the weight {tuple(weight.shape)}"
        elif state == MASTER and not shard.to(weight.dtype).equal(weight):
            problem = f"does not round to the weight in {str(weight.dtype).removeprefix('torch.')}"
        else:
            continue
        raise CheckpointError(run.folder, f"layer {place[0]}'s {place[1]} of tensor rank {rank}: its {state} {problem}")
