"""Facts about a class of transformers, as JSON: `python -m megatron.kinds.transformers.inspection < options.json`."""

import contextlib
import io
import json
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .build import hf_config, hf_model
from .cut import cuts_of, sizes_of
from .facts import Facts, FactsError
from .outline import linears_of, stack_of
from .probe import SMALL, keeps_apart, output_of, positions_of, probe


def inspect(options: dict[str, Any]) -> dict[str, Any]:
    """The facts of a model, or the key, the rule and the fix of a problem."""
    try:
        _check_settings(options)
        if options["weights"] and not options["settings"]:  # a checkpoint needs no folder
            _check_weights(options)
        with torch.device("meta"):
            facts = facts_of_model(hf_model(options, values=False))
        facts = replace(facts, settings=_without_version(json.loads(hf_config(options).to_json_string())))
        if facts.parameters < SMALL:  # so small that its function is checked before a process starts
            small = hf_model(options, values=False)
            probe(small)
            facts = replace(facts, documents=keeps_apart(small))
        return asdict(facts)
    except FactsError as error:
        return {"key": error.key, "rule": error.rule, "fix": error.fix}


def _without_version(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without the version of transformers: with another version it is the same model."""
    return {
        name: _without_version(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name != "transformers_version"
    }


def _check_settings(options: dict[str, Any]) -> None:
    """Options that were changed after the settings were resolved would have no effect."""
    changes = options["options"]
    if not changes or not options["settings"]:
        return
    try:
        wanted = hf_config({**options, "settings": {}}).to_dict()
    except FactsError:  # such as a folder that is not here
        return
    used = hf_config(options).to_dict()
    for name in changes:
        if wanted.get(name) != used.get(name):
            rule = f"{name} must be {used.get(name)!r}, as in settings, which have precedence"
            raise FactsError(".options", rule, "remove settings, and they are resolved again")


def _check_weights(options: dict[str, Any]) -> None:
    from pathlib import Path

    folder = Path(options["config"])
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise FactsError(
            ".weights", f"must be false: {folder} is no folder with weights", "give a folder with *.safetensors"
        )


def facts_of_model(model: PreTrainedModel) -> Facts:
    """Sizes of a model, which may be without values."""
    head, table = output_of(model), model.get_input_embeddings()
    parameters = dict(model.named_parameters())
    total = sum(each.numel() for each in parameters.values())
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)} | {id(head.weight)}
    matrices = sum(each.numel() for each in parameters.values() if each.ndim > 1 and id(each) not in tables)
    stacks = [each.numel() for each in parameters.values() if each.ndim == 3 and "expert" in _name(parameters, each)]
    divided, uncut = dict[str, int](), ""
    try:
        divided = sizes_of(model, cuts_of(model))
    except FactsError as error:
        uncut = error.rule
    settings, (_, blocks) = model.config.get_text_config(), stack_of(model)
    chosen = getattr(settings, "num_experts_per_tok", None) or getattr(settings, "top_k_experts", None)
    experts = next((e.shape[0] for e in parameters.values() if e.ndim == 3 and "expert" in _name(parameters, e)), 0)
    idle = round(sum(stacks) * (1 - chosen / experts)) if experts and isinstance(chosen, int) else 0
    tokens = next((name for name, each in parameters.items() if each is getattr(table, "weight", None)), "")
    return Facts(
        class_name=type(model).__name__,
        hidden_size=head.weight.shape[1],
        vocab_size=head.weight.shape[0],
        layers=getattr(settings, "num_hidden_layers", 1) or 1,
        tied=getattr(table, "weight", None) is head.weight,
        parameters=total,
        matrices=matrices - idle,
        idle=idle,
        positions=positions_of(model),
        sizes=[sum(each.numel() for each in block.parameters()) for block in blocks],
        linears=list(linears_of(model)),
        divided=divided,
        uncut=uncut,
        table=tokens.rpartition(".")[0],
    )


def _name(parameters: dict[str, nn.Parameter], wanted: nn.Parameter) -> str:
    return next(name for name, each in parameters.items() if each is wanted)


def main() -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        found = inspect(json.load(sys.stdin))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
