"""A model of transformers from the options of a configuration, and its costs for plans."""

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.logging import disable_progress_bar

from megatron.config.file_access import read_json
from megatron.config.pattern import MAX_BLOCKS
from megatron.config.sections.model import ModelSection
from megatron.config.tree import thaw
from megatron.kinds.transformers.options import TransformersOptions
from megatron.model.counts import Counts
from megatron.model.initialisation import Initialisation
from megatron.parallel.layers.parameters import ParameterFactory, logical_of
from megatron.parallel.layout.random import site_key
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard

from .cut import cuts_of, part_of
from .facts import FactsError, facts_of
from .outline import stack_of
from .probe import output_of


def hf_config(options: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of the class.

    Raises:
        FactsError: it cannot be read, or has no such settings.
    """
    given, changes, resolved = str(options["config"]), thaw(options["options"]), thaw(options["settings"])
    path = Path(given)
    if not options["trust_remote_code"]:
        _refuse_code(".attention", {"attn_implementation": options["attention"]})
        _refuse_code(".options", changes)
        _refuse_code(".settings", resolved)
    if resolved and not options["trust_remote_code"]:
        return _of_type(str(resolved.pop("model_type", "")), PreTrainedConfig._decode_special_floats(resolved))
    if path.is_dir():
        base = _read(path, options["trust_remote_code"])
    elif path.is_file():
        base = _from_file(path, options["trust_remote_code"])
    else:
        base = _of_type(given, {})
    allowed = {*base.to_dict(), *vars(base), *base.attribute_map}
    for name in changes:
        if name not in allowed or name.startswith("_"):
            near = difflib.get_close_matches(name, [each for each in allowed if not each.startswith("_")], 1)
            fix = f"did you mean {near[0]}?" if near else f"see the settings of {type(base).__name__} in transformers"
            raise FactsError(".options", f"{name!r} must be a setting of {type(base).__name__}", fix)
    if not changes:
        return base
    if not path.exists():
        return _of_type(given, changes)
    try:
        return type(base).from_dict(_merged(base.to_dict(), changes))
    except Exception as error:  # a class may raise anything
        raise _refused(".options", error) from error


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {name: _merged(base[name], value) for name, value in changes.items() if isinstance(base.get(name), dict)}
    return {**base, **changes, **both}


def _refused(key: str, error: Exception) -> FactsError:
    rule = f"must be what transformers accepts. It says: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return FactsError(key, rule, "change model.transformers.options or .config")


def _refuse_code(key: str, values: Any) -> None:
    for name, value in values.items() if isinstance(values, dict) else ():
        texts = value.values() if isinstance(value, dict) else [value]
        if str(name).endswith("implementation") and any("/" in str(each) for each in texts):
            rule = f"{name} must be code of transformers, and not of a repository, which has the user's rights"
            raise FactsError(key, rule, "use sdpa. Or read that code, then set trust_remote_code: true")
        _refuse_code(key, value)


def _refuse_sizes(key: str, values: Any) -> None:
    for name, value in values.items() if isinstance(values, dict) else ():
        if str(name).endswith(("layer", "layers")) and isinstance(value, int) and value > MAX_BLOCKS:
            raise FactsError(key, f"{name} must be at most {MAX_BLOCKS}, and is {value}", "use fewer layers")
        _refuse_sizes(key, value)


def _read(folder: Path, trust: bool) -> PreTrainedConfig:
    try:
        values = read_json(folder / "config.json")
        own = isinstance(values, dict) and values.get("auto_map")
    except (OSError, ValueError) as error:
        raise FactsError(".config", f"must have a config.json ({error})", "give the folder of a model") from error
    if own and not trust and values.get("model_type") not in CONFIG_MAPPING:
        raise FactsError(
            ".trust_remote_code",
            "must be true for this folder: its model is Python code in the folder, which has the user's rights",
            "read the code, then set trust_remote_code: true. Or use a model type of transformers",
        )
    if not trust:
        _refuse_code(".config", values)
    _refuse_sizes(".config", values)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
    except Exception as error:
        raise _refused(".config", error) from error


def _from_file(path: Path, trust: bool) -> PreTrainedConfig:
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise FactsError(".config", f"must be a config.json ({error})", "give a JSON file of settings") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise FactsError(
            ".config", "its JSON must be an object with a model_type", "add model_type, as in a config.json"
        )
    if not trust:
        _refuse_code(".config", values)
    return _of_type(values["model_type"], {name: value for name, value in values.items() if name != "model_type"})


def _of_type(name: str, values: dict[str, Any]) -> PreTrainedConfig:
    if name not in CONFIG_MAPPING:
        near = difflib.get_close_matches(name, list(CONFIG_MAPPING.keys()), 1)
        fix = f"did you mean {near[0]}?" if near else "give a model type of the installed transformers, or a path"
        raise FactsError(".config", f"{name!r} must be a folder, a file or a model type of transformers", fix)
    _refuse_sizes(".options", values)
    try:
        return CONFIG_MAPPING[name](**values)
    except Exception as error:
        raise _refused(".options", error) from error


def hf_model(options: Mapping[str, Any], seed: int = 0, values: bool = True) -> PreTrainedModel:
    """The model in fp32 on the default device, in training mode.

    Its initial values are the class's own under a seed, on the CPU, so they are equal on all ranks and layouts.

    Args:
        values: False: a checkpoint has the values, so a folder's weights are not read.

    Raises:
        FactsError: it cannot be built.
    """
    disable_progress_bar()
    trust = options["trust_remote_code"]
    more: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust}
    if options["attention"] != "auto":
        more["attn_implementation"] = options["attention"]
    config = hf_config(options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(site_key(seed, "transformers"))
        try:
            if options["weights"] and values:
                return _fixed(_with_weights(options["config"], config, more))
            return _fixed(AutoModelForCausalLM.from_config(config, **more))
        except FactsError:
            raise
        except Exception as error:  # a class may raise anything
            known = getattr(AutoModelForCausalLM, "_model_mapping", {})
            if type(config) not in known and not trust:
                rule = f"{config.model_type} must have a class for causal language models, and transformers has none"
                raise FactsError(".config", rule, "use another model type") from error
            raise _refused(".options" if options["options"] else ".config", error) from error


def _with_weights(folder: str, config: PreTrainedConfig, more: dict[str, Any]) -> PreTrainedModel:
    """Load the model with all weights of a folder. transformers only warns about missing ones."""
    if (Path(folder) / "adapter_config.json").exists():
        rule = "must have no adapter_config.json: its adapters would be added only where peft is installed"
        raise FactsError(".config", rule, "merge them into the weights (peft's merge_and_unload), or remove it")
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, local_files_only=True, output_loading_info=True, **more
    )
    if getattr(model, "is_quantized", False):
        rule = "must have weights of 16 bits or more, and has quantized ones (quantization_config)"
        raise FactsError(".config", rule, "give the folder of the model before it was quantized")
    missing, further = sorted(info["missing_keys"]), sorted(filter(_is_of(model), info["unexpected_keys"]))
    if missing:
        rule = f"must have all weights of {type(model).__name__}, and lacks {len(missing)}, such as {missing[0]}"
        raise FactsError(".config", rule, "give a folder with all of them, or set weights: false")
    if further:
        rule = f"must use all weights of its layers: the folder has {len(further)} more, such as {further[0]}"
        raise FactsError(".options", rule, "use the settings of the folder's config.json")
    if set(model.get_expanded_tied_weights_keys(all_submodels=True)) - set(model.all_tied_weights_keys):
        rule = "tie_word_embeddings must be false: the folder has several values of tied weights"
        raise FactsError(".options", rule, "set options: {tie_word_embeddings: false}")
    return model


def _is_of(model: nn.Module) -> Callable[[str], bool]:
    """Whether a tensor, which the class lacks, is of a layer that it has, such as a bias that the settings exclude.
    A folder may have other models, such as one of pictures, and blocks that the settings exclude."""
    layers = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    return lambda name: name.rpartition(".")[0] in layers


def _fixed(model: PreTrainedModel) -> PreTrainedModel:
    """Make buffers of parameters that the class never trains, such as sinusoids: checkpoints and all pipeline stages
    have buffers. Its weights are not quantized, whatever its settings say of a folder."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for module in model.modules():
        for name, each in list(module._parameters.items()):
            if each is not None and not each.requires_grad:
                del module._parameters[name]
                module.register_buffer(name, each.data)
    return model.train()


# Korthikanti et al. 2022: 34 bytes per token and channel of a layer in 16-bit training, attention without its scores.
ACTIVATIONS = 17


def mark(
    model: nn.Module, head: nn.Module, fp32: tuple[str, ...] = (), shards: Mapping[str, Shard] = MappingProxyType({})
) -> None:
    """Give each parameter its logical tensor. Its name is that of transformers.

    Args:
        head: the output layer.
        shards: of parameters, by name.
        fp32: parts of the names of parameters that stay in fp32.
    """
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if id(parameter) in tables:
            role = Role.EMBEDDING
        elif parameter is getattr(head, "weight", None):
            role = Role.HEAD
        elif parameter.ndim < 2:
            role = Role.BIAS if name.endswith("bias") else Role.NORM
        else:
            role = Role.HIDDEN if parameter.ndim < 4 and "conv" not in name else Role.CONVOLUTION
        shape = tuple(parameter.shape)
        stacked = (shape[1],) if role is Role.HIDDEN and parameter.ndim == 3 else None
        marks: Any = parameter
        wide = any(each in name for each in fp32)
        marks.logical, marks.cut = LogicalTensor(name, shape, role, shards.get(name), wide, stacked), (0, 1)


class Trunk(nn.Module):
    """The parameters of one block of the class, without values, for plans. The first also has what is neither in a
    block nor embedding or head."""

    indexed = True

    def __init__(
        self, make: ParameterFactory, model: ModelSection, options: TransformersOptions, init: Initialisation
    ) -> None:
        super().__init__()
        with torch.device("meta"):
            whole = hf_model(options.model_dump(), values=False)
        head, (_, blocks) = output_of(whole), stack_of(whole)
        ranks = make.mesh.tensor.size
        mark(whole, head, shards=cuts_of(whole).shards if ranks > 1 else {})
        outside = {id(head.weight), id(getattr(whole.get_input_embeddings(), "weight", None))}
        others = outside.union(*({id(each) for each in block.parameters()} for block in blocks))
        own = list(blocks[init.index].parameters()) if blocks else []
        if init.index == 0:
            own += [each for each in whole.parameters() if id(each) not in others]
        self.parts = nn.ParameterList(own)
        for each in self.parts:
            each.data = part_of(each.data, each, make.mesh.tensor).to(make.dtype)
            marks: Any = each
            if logical_of(each).shard and ranks > 1:
                marks.cut, marks.model_parallel = (make.mesh.tensor.rank, ranks), True

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        raise NotImplementedError("a plan has the sizes of these parameters, and the whole model computes with them")

    @staticmethod
    def counts(model: ModelSection, options: TransformersOptions, sequence_length: int, index: int) -> Counts:
        """Estimates but for the parameters: attention and activations as in a dense transformer of this width."""
        facts, H = facts_of(options.model_dump()), model.hidden_size
        outside = (1 if facts.tied else 2) * facts.vocab_size * H
        sizes = list(facts.sizes) or [1]
        before, own = sum(sizes[:index]), sizes[index]

        def share(number: int) -> int:
            """This block's part of a number of all blocks. The parts add up."""
            return number * (before + own) // sum(sizes) - number * before // sum(sizes)

        held = own + (0 if index else facts.parameters - outside - sum(sizes))
        return Counts(
            parameters=held if facts.sizes else facts.parameters - outside,
            flops=share(2 * facts.matrices + 4 * facts.layers * sequence_length * H),
            activations=share(ACTIVATIONS * facts.layers * H),
            products=share(facts.layers * 8 * H),
            idle=share(facts.idle),
        )
