"""Convert a Hugging Face model to a checkpoint, from which a run can be initialised."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig

from megatron.config.file_access import read_json
from megatron.config.pattern import MAX_BLOCKS
from megatron.config.resolution import Resolved, combine
from megatron.config.schema import Config
from megatron.config.source.layers import ConfigSource as Values
from megatron.config.source.resolved_file import to_yaml
from megatron.config.tree import thaw
from megatron.data.tokenizer import unreachable
from megatron.model.stack import build_model
from megatron.parallel.layers.parameters import logical_of, stored_tensors
from megatron.parallel.layout.shard import LogicalTensor
from megatron.worker.place import StartError

from ..format.container import TensorEntry, read_header
from ..format.errors import CheckpointError, understanding
from ..format.fragment import WEIGHT, FragmentSpec
from ..format.manifest import Meta
from ..save.writer import write_tensors
from .architecture import SCORER, Architecture
from .companions import TOKENIZER_FILES, Companions, file_in
from .config import Extensions, architecture_of, extensions_for, known_architectures, longest, model_values
from .convert import INDEX, ConversionStep, match, plan

CONFIG = "config.json"
WEIGHTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32)
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # such as a zero, or no list
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


class Folder:
    """The tensors of a Hugging Face folder of safetensors, read one by one.

    Raises:
        CheckpointError: there are none, a file is missing, or the index is wrong.
    """

    def __init__(self, path: Path):
        self.path = path
        listed = self._listed()
        self.types: dict[str, torch.dtype] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.places: dict[str, Path] = {}
        for file in sorted(set(listed.values())) if listed else [self._file("model.safetensors")]:
            for name, entry in _header(file).items():
                if not name.isprintable():
                    raise CheckpointError(file, f"{name!r:.200} is no name of a tensor: it must be printable")
                if name in self.places:
                    raise CheckpointError(path, f"{name} is in {self.places[name].name} and in {file.name}")
                self.types[name], self.shapes[name], self.places[name] = entry.dtype, entry.shape, file

        wrong = [
            f"{INDEX} says that {name} is in {file.name}, and it is not"
            for name, file in listed.items()
            if self.places.get(name) != file
        ]
        if wrong:
            raise CheckpointError(path, wrong)

    def _listed(self) -> dict[str, Path]:
        index = self._file(INDEX, must=False)
        if not index.is_file():
            return {}
        with understanding(index):
            listed = {str(name): str(file) for name, file in read_json(index)["weight_map"].items()}
        places = {file: self._file(file, must=False) for file in sorted(set(listed.values()))}
        lost = [name for name, place in places.items() if not place.is_file()]
        if lost:
            raise CheckpointError(self.path, [f"{name} is lost" for name in lost])
        return {name: places[file] for name, file in listed.items()}

    def _file(self, name: str, *, must: bool = True) -> Path:
        place = file_in(self.path, name)
        if must and not place.is_file():
            rule = "it has no safetensors. Older files (pytorch_model.bin) can run code: save them as safetensors first"
            raise CheckpointError(self.path, rule)
        return place

    def usual_type(self) -> str:
        """The type of most elements."""
        sizes = Counter[torch.dtype]()
        for name, dtype in self.types.items():
            sizes[dtype] += math.prod(self.shapes[name])
        return str(max(sizes, key=sizes.__getitem__, default=torch.float32)).removeprefix("torch.")

    def read(self, name: str) -> torch.Tensor:
        try:
            with safe_open(self.places[name], framework="pt") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(self.places[name], f"{name!r:.200} cannot be read: {error}") from error


def _header(file: Path) -> dict[str, TensorEntry]:
    try:
        return read_header(file)[0]
    except CheckpointError as error:
        raise CheckpointError(file, [f"{each}: fetch or save the file again" for each in error.problems]) from error


def locate(model: str, extensions: Extensions = ()) -> Path:
    """A local folder, or the downloaded files of a model on the hub.

    Raises:
        CheckpointError: it is neither.
    """
    if Path(model).is_dir():
        snapshots = sorted(each for each in Path(model).glob("snapshots/*") if (each / CONFIG).exists())
        if snapshots and not (Path(model) / CONFIG).exists():
            there = " or ".join(map(str, snapshots))
            raise CheckpointError(model, f"it is a model's folder in the hub's cache: give a version of it, {there}")
        return Path(model)
    from huggingface_hub import constants, hf_hub_download, snapshot_download

    missing = None if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    cached = bool(missing)
    try:
        # nothing is fetched for a model that we cannot take
        read_config(Path(hf_hub_download(model, "config.json", local_files_only=cached)).parent, extensions)
        wanted = ["*.safetensors", "*.json", "tokenizer*", *TOKENIZER_FILES, "additional_chat_templates/*"]
        return Path(snapshot_download(model, allow_patterns=wanted, local_files_only=cached))
    except CheckpointError:
        raise
    except Exception as error:  # the hub library raises errors of many kinds: no such name, no network, no access
        why = missing and f"it is not in the hub's local cache, and {missing}"
        raise CheckpointError(
            model, f"it is no local folder, and {why or f'could not be fetched from the hub: {error}'}"
        ) from error


def read_config(folder: Path, extensions: Extensions = ()) -> PreTrainedConfig:
    """The configuration of a Hugging Face folder. No code in the folder is run.

    Raises:
        CheckpointError: there is none, its architecture is unknown, or transformers rejects it.
    """
    file = folder / CONFIG
    try:
        written = read_json(file)
        kind = written["model_type"]
    except OSError as error:
        raise CheckpointError(folder, f"it is no Hugging Face model: {CONFIG} cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(file, f"it is damaged, or has no model_type: {error!r}") from error
    known_architectures(kind, extensions)
    for name in LAYERS:  # before lists of that length are made
        count = written.get(name)
        if isinstance(count, (int, float)) and count > MAX_BLOCKS:
            raise CheckpointError(file, f"{name} must be at most {MAX_BLOCKS}, not {count!r:.40}")
    if written.get("quantization_config"):
        raise CheckpointError(file, "its weights are quantised (quantization_config): take a model in 16 or 32 bits")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each class checks its own values in its own way
        raise CheckpointError(file, f"transformers does not accept it: {error}") from error


def settings(
    folder: Path, sequence_length: int | None = None, extensions: Extensions = (), further: bool = False
) -> Resolved:
    """The configuration of a run with this model. Arguments and errors as of `import_model`."""
    theirs = read_config(folder, extensions)
    extensions = extensions_for(theirs.model_type, extensions)
    length = sequence_length or longest(theirs)
    try:
        model = model_values(theirs, extensions)
    except MALFORMED as error:
        raise CheckpointError(
            folder / CONFIG, f"a setting has another form than in {theirs.model_type}: {error!r}"
        ) from error
    if extensions:
        model["extensions"] = list(extensions)
    if further:
        model["multi_token_prediction"] = _further(folder, theirs, extensions)
    values: dict[str, Any] = {"model": model, "training": {"steps": 0, "sequence_length": length}}
    named = theirs.architectures if isinstance(theirs.architectures, list) else []
    if any(str(name).endswith(SCORER) for name in named):
        if theirs.num_labels != 1:
            raise CheckpointError(folder / CONFIG, f"a reward model must have num_labels 1, not {theirs.num_labels}")
        values["objective"] = {"type": "reward_model"}
    values["tokenizer"] = {"type": "none"}
    if (folder / "tokenizer.json").is_file():
        # the name in the folder, which in the hub's cache is a link to a file without one
        values["tokenizer"] = {"type": "huggingface", "path": str((folder / "tokenizer.json").absolute())}
    return combine([Values(values)], ranks=1, check_inputs=False, name=folder.name)


def _further(folder: Path, theirs: PreTrainedConfig, extensions: Extensions) -> dict[str, Any]:
    block, depth = architecture_of(theirs, extensions).further_block, getattr(theirs, "num_nextn_predict_layers", 0)
    if not block or not isinstance(depth, int) or depth < 1:
        raise CheckpointError(
            folder / CONFIG,
            f"it has no layers that predict further tokens and can be kept (num_nextn_predict_layers: {depth}): "
            "import it without them",
        )
    return {"depth": depth, "block": block}


def import_model(
    folder: Path,
    out: Path,
    *,
    sequence_length: int | None = None,
    extensions: Extensions = (),
    further: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Resolved:
    """Write the weights of a Hugging Face folder as a checkpoint of step 0 (only weights, in their own type).

    Args:
        extensions: modules that may have its architecture. The checkpoint's configuration lists them.
        further: keep layers that predict further tokens (`model.multi_token_prediction`). They are skipped otherwise.

    Returns:
        The configuration with which it was written.

    Raises:
        CheckpointError: settings that our model does not compute, or tensors missing, left over or of another shape.
    """
    if out.exists():
        raise CheckpointError(out, "it exists already")
    resolved = settings(folder, sequence_length, extensions, further)
    listed, source = tuple(resolved.config.model.extensions), Folder(folder)
    kept = Companions.read(folder, resolved.config.tokenizer, source.usual_type())
    write(source, architecture_of(read_config(folder, listed), listed), resolved, out, progress, kept)
    return resolved


def import_class(config: Config, folder: Path, out: Path) -> None:
    """As `import_model`, for a run whose model is a class of transformers: with its own names, in fp32.

    Raises:
        CheckpointError: the class cannot be built with the run's settings, or weights are missing.
    """
    kind = config.model.layers
    own = thaw(getattr(config.model, kind).model_dump())
    values: dict[str, Any] = {
        "model": {"layers": kind, kind: own},
        "training": {"steps": 0, "sequence_length": config.training.sequence_length},
        "tokenizer": thaw(config.tokenizer.model_dump()),
    }
    resolved = combine([Values(values)], ranks=1, check_inputs=False, name=folder.name)
    values["model"] = {"layers": kind, kind: {**own, "config": str(folder), "weights": True}}
    try:
        model = build_model(combine([Values(values)], ranks=1, check_inputs=False).config, dtype=torch.float32)
    except StartError as error:
        raise CheckpointError(folder, str(error)) from error
    tensors = stored_tensors(model)
    items = [(FragmentSpec.whole(logical_of(each), WEIGHT), torch.float32) for each in tensors]
    meta = Meta(step=0, config=to_yaml(resolved), resumable=False, extra={"imported": type(model).__name__})
    write_tensors(out, items, lambda number: [tensors[number].detach().flatten()], meta)


class WeightSource(Protocol):
    """A source of tensors: type, shape and place of each by name, and a method to read one."""

    path: Path
    types: dict[str, torch.dtype]
    shapes: dict[str, tuple[int, ...]]
    places: dict[str, Path]

    def read(self, name: str) -> torch.Tensor: ...


def write(
    source: WeightSource,
    architecture: Architecture,
    resolved: Resolved,
    out: Path,
    progress: Callable[[str], None],
    kept: Companions | None = None,
) -> None:
    """Write the tensors of a source as a checkpoint of step 0. Errors as of `import_model`."""
    logical = _logical_tensors(source, resolved)
    steps = plan(architecture, logical, resolved.config.model)
    model = resolved.config.model
    further = architecture.further(source.places, len(model.blocks) + len(model.further_blocks))
    if further:
        progress(f"skipped: {len(further)} tensors of layers that predict further tokens, such as {further[0]}")
    present = [name for name in source.places if name not in set(further)]
    try:
        there = match(architecture, steps, present, read=source.read)
    except CheckpointError as error:
        raise CheckpointError(f"{source.path} as {error.subject}", error.problems) from error
    _check_shapes(source.path, steps, logical, source, there)
    # Each tensor keeps its type. The writer takes wide types first, so the tensors of a step stay together.
    items = [
        (
            FragmentSpec.whole(logical[name], WEIGHT),
            torch.float32 if step.form.whole else source.types[there[step.theirs[0]]],
        )
        for step in steps
        for name in step.ours
    ]
    values = _values(steps, source, there, progress)
    extra = {"imported": architecture.class_name, **(kept.extra() if kept is not None else {})}
    meta = Meta(step=0, config=to_yaml(resolved), resumable=False, extra=extra)
    write_tensors(out, items, lambda number: values(items[number][0].tensor.name), meta)


def logical_tensors(resolved: Resolved) -> dict[str, LogicalTensor]:
    model = build_model(resolved.config, device="meta")
    return {logical_of(tensor).name: logical_of(tensor) for tensor in stored_tensors(model)}


def _logical_tensors(source: WeightSource, resolved: Resolved) -> dict[str, LogicalTensor]:
    blocks = len(resolved.config.model.blocks)
    if blocks > len(source.places):
        raise CheckpointError(
            source.path,
            f"its configuration must have at most {len(source.places)} layers, the number of tensors in its files, not "
            f"{blocks}: correct the configuration, or fetch all files",
        )
    try:
        return logical_tensors(resolved)
    except (RuntimeError, OverflowError) as error:
        raise CheckpointError(source.path, f"no model has the sizes that the configuration says: {error}") from error


def _check_shapes(
    path: Path, steps: list[ConversionStep], ours: dict[str, LogicalTensor], source: WeightSource, there: dict[str, str]
) -> None:
    """Refuse tensors of other shapes than ours, and of different types in one step, before anything is written."""
    problems = []
    for step in steps:
        names = [there[name] for name in step.theirs]
        if len({source.types[name] for name in names}) > 1:
            problems.append(f"{' and '.join(names)} are of different types")
        problems += [
            f"{name} has the type {str(source.types[name]).removeprefix('torch.')}. Weights must be float64, float32, "
            f"bfloat16 or float16{', and this tensor int64 or int32' if step.form.whole else ''}"
            for name in names
            if source.types[name] not in (WHOLE if step.form.whole else WEIGHTS)
        ]
        wanted = step.shapes({name: ours[name].shape for name in step.ours})
        found = {name: source.shapes[there[name]] for name in step.theirs}
        if found != wanted and not step.cut_otherwise(found, wanted):
            problems += [
                f"{there[name]} has the shape {found[name]}, and must have {shape} by the configuration"
                for name, shape in wanted.items()
                if found[name] != shape
            ]
    if problems:
        raise CheckpointError(path, problems)


def _values(
    steps: list[ConversionStep], source: WeightSource, there: dict[str, str], progress: Callable[[str], None]
) -> Callable[[str], Iterator[torch.Tensor]]:
    """A function that gives one of our tensors by name, flat. The last step's tensors are kept until they are read."""
    step_of = {name: step for step in steps for name in step.ours}
    kept: dict[str, torch.Tensor] = {}

    def values(name: str) -> Iterator[torch.Tensor]:
        if name not in kept:
            kept.clear()
            kept.update(step_of[name].from_hf(lambda theirs: _finite(source, there[theirs])))
            progress(name)
        yield kept.pop(name).flatten()

    return values


def _finite(source: WeightSource, name: str) -> torch.Tensor:
    """Read a tensor, and refuse infinite and NaN values."""
    tensor = source.read(name)
    # An infinity or a NaN anywhere shows in the extremes, without a copy of the tensor.
    if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
        raise CheckpointError(
            source.path, f"{name} has values that are infinite or no numbers. All must be finite: take another copy"
        )
    return tensor
