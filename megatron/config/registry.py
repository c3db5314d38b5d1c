"""The names in a configuration: a table of import paths, which extensions add to.

An entry is "package.module:attribute". Nothing is imported before its name is used, so that this table can name what
needs torch. An extension is a Python module or package with a mapping of the same form:

    EXTENSION = {"optimizer": {"sgdm": "my_lab.sgdm:SGDM"}, "kind": {"retention": "my_lab.retention.options:KIND"}}

A configuration lists the extensions that it needs in `model.extensions`. `registry_of` returns the table with them. An
installed package can offer its names without being listed, by entry points. The group is `deepy.<role>` (`deepy.kind`,
`deepy.optimizer`, `deepy.runner`, ...), the name is the thing's name, and the value is the extension's module. The
module is then added to `model.extensions`. A name that has a colon is an import path by itself."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from .admitted import RULE, how_to_admit, is_strange
from .problems import RuleError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

KIND, OPTIMIZER, SCHEDULE, HOOK, METRIC, RUNNER = "kind", "optimizer", "schedule", "hook", "metric", "runner"
ARCHITECTURE, OBJECTIVE, SOURCE, FEATURE = "architecture", "objective", "source", "feature"
SCORER = "scorer"

# Of Hugging Face models (megatron.checkpoint.hf.architecture), in the order in which export tries them: module:name.
_ARCHITECTURES = (
    "layernorm:gpt_neox llama:llama llama:mistral llama:qwen3 llama:olmo2 llama:qwen2 llama:smollm3 llama:olmo3",
    "llama:granite llama:phi3 llama:glm4 gemma:gemma2 gemma:gemma3_text gemma:gemma4_text llama:olmo_hybrid",
    "layernorm:gpt2 mamba:mamba mamba:mamba2 experts:mixtral experts:qwen2_moe experts:qwen3_moe experts:olmoe",
    "zamba:zamba zamba:zamba2 mamba:bamba mamba:falcon_h1 mamba:jamba experts:zaya rwkv:rwkv deepseek:deepseek_v2",
    "deepseek:deepseek_v3 mamba:nemotron_h experts:gpt_oss llama:seed_oss llama:arcee llama:apertus llama:olmo",
    "llama:ernie4_5 llama:helium llama:glm gemma:gemma layernorm:cohere layernorm:cohere2 layernorm:starcoder2",
    "layernorm:nemotron layernorm:stablelm layernorm:phi layernorm:gptj deepseek:glm4_moe qwen_next:qwen3_next",
    "qwen_next:qwen3_5_text qwen_next:qwen3_5_moe_text deepseek:deepseek_v32 deepseek_v4:deepseek_v4",
    "deepseek:glm_moe_dsa deepseek:glm4_moe_lite experts:minimax experts:minimax_m2 kimi_linear:kimi_linear",
)

# By role, then by name. A new part of this package is one line here.
INSIDE: dict[str, dict[str, str]] = {
    # Kinds of layers (`kind.LayerKind`), in the order of their sections in `model`.
    KIND: {
        "attention": "megatron.kinds.attention.options:KIND",
        "mla": "megatron.kinds.mla.options:KIND",
        "dsa": "megatron.kinds.dsa.options:KIND",
        "csa": "megatron.kinds.csa.options:KIND",
        "mamba": "megatron.kinds.mamba.options:MAMBA",
        "mamba2": "megatron.kinds.mamba.options:MAMBA2",
        "rwkv4": "megatron.kinds.rwkv.options:RWKV4",
        "rwkv5": "megatron.kinds.rwkv.options:RWKV5",
        "rwkv6": "megatron.kinds.rwkv.options:RWKV6",
        "rwkv7": "megatron.kinds.rwkv.options:RWKV7",
        "rwkv4_ffn": "megatron.kinds.rwkv.options:RWKV4_FFN",
        "rwkv5_ffn": "megatron.kinds.rwkv.options:RWKV5_FFN",
        "rwkv6_ffn": "megatron.kinds.rwkv.options:RWKV6_FFN",
        "rwkv7_ffn": "megatron.kinds.rwkv.options:RWKV7_FFN",
        "gated_delta": "megatron.kinds.gated_delta.options:KIND",
        "lightning": "megatron.kinds.lightning.options:KIND",
        "cca": "megatron.kinds.cca.options:KIND",
        "shared_attention": "megatron.kinds.shared_attention.options:KIND",
        "mlp": "megatron.kinds.mlp.options:KIND",
        "moe": "megatron.kinds.moe.options:KIND",
        "transformers": "megatron.kinds.transformers.options:KIND",
    },
    OPTIMIZER: {  # see megatron.engine.optimizers.contract
        "adamw": "megatron.engine.optimizers.facts:ADAMW",
        "lion": "megatron.engine.optimizers.facts:LION",
        "sgd": "megatron.engine.optimizers.facts:SGD",
        "muon": "megatron.engine.optimizers.facts:MUON",
        "normuon": "megatron.engine.optimizers.facts:NORMUON",
        "dion": "megatron.engine.optimizers.facts:DION",
        "soap": "megatron.engine.optimizers.facts:SOAP",
        "adafactor": "megatron.engine.optimizers.facts:ADAFACTOR",
        "adamw_8bit": "megatron.engine.optimizers.facts:ADAMW_8BIT",
        "ademamix": "megatron.engine.optimizers.facts:ADEMAMIX",
        "adam_mini": "megatron.engine.optimizers.facts:ADAM_MINI",
        "schedule_free_adamw": "megatron.engine.optimizers.facts:SCHEDULE_FREE_ADAMW",
    },
    SCHEDULE: {  # see megatron.training.schedule
        "constant": "megatron.training.schedule:constant",
        "linear": "megatron.training.schedule:linear",
        "cosine": "megatron.training.schedule:cosine",
        "wsd": "megatron.training.schedule:wsd",
        "inverse_sqrt": "megatron.training.schedule:inverse_sqrt",
        "infinite": "megatron.training.schedule:infinite",
    },
    OBJECTIVE: {  # see megatron.objectives.contract
        "cross_entropy": "megatron.objectives.cross_entropy.options:OBJECTIVE",
        "distillation": "megatron.objectives.distillation.options:OBJECTIVE",
        "goldfish": "megatron.objectives.goldfish.options:OBJECTIVE",
        "dpo": "megatron.objectives.dpo.options:OBJECTIVE",
        "policy": "megatron.objectives.policy.options:OBJECTIVE",
        "kto": "megatron.objectives.kto.options:OBJECTIVE",
        "reward_model": "megatron.objectives.reward_model.options:OBJECTIVE",
    },
    SOURCE: {  # of samples that no order cuts from token files: megatron.data.contract
        "copy": "megatron.data.contract:Copy",
        "pairs": "megatron.data.preferences.pairs:Pairs",
        "reward_pairs": "megatron.data.preferences.pairs:RewardPairs",
        "rated": "megatron.data.preferences.pairs:Rated",
        "rollouts": "megatron.features.align.rollouts:Rollouts",
    },
    HOOK: {  # in the order in which they act (megatron.training.hook)
        "goodput": "megatron.training.hooks.ledger:GoodputHook",  # comes last: ends go backwards
        "summary": "megatron.training.hooks.summary:SummaryHook",
        "ledger": "megatron.training.hooks.ledger:LedgerHook",
        "guard": "megatron.training.hooks.guard:GuardHook",
        "stop": "megatron.training.hooks.guard:StopHook",
        "profile": "megatron.training.hooks.profile:ProfileHook",
        "communication": "megatron.training.hooks.communication:CommunicationHook",
        "prediction": "megatron.training.hooks.summary:PredictionHook",
        "lengths": "megatron.training.hooks.log:LengthsHook",
        "log": "megatron.training.hooks.log:LogHook",
        "experts": "megatron.training.hooks.experts:DeadExpertsHook",
        "average": "megatron.training.hooks.average:AverageHook",
        "evaluate": "megatron.training.hooks.evaluate:EvaluateHook",
        "tasks": "megatron.evaluation.hook:TasksHook",
        "probes": "megatron.evaluation.hook:ProbesHook",
        "samples": "megatron.training.hooks.samples:SamplesHook",
        "slow": "megatron.training.hooks.slow:SlowRanksHook",
        "levels": "megatron.training.hooks.levels:LevelsHook",
        "checkpoint": "megatron.training.hooks.checkpoint:CheckpointHook",
    },
    FEATURE: {  # see megatron.config.features.feature
        "adapters": "megatron.features.adapters.options:FEATURE",
        "pruning": "megatron.features.pruning.options:FEATURE",
        "align": "megatron.features.align.options:FEATURE",
        "multi_token": "megatron.features.multi_token.options:FEATURE",
        "statistics": "megatron.features.statistics.options:FEATURE",
        "spikes": "megatron.features.spikes.options:FEATURE",
        "hashes": "megatron.features.integrity.options:HASHES",
        "audit": "megatron.features.integrity.options:AUDIT",
        "noise_scale": "megatron.features.noise_scale.options:FEATURE",
        "peers": "megatron.features.peers.options:FEATURE",
        "peer_gradients": "megatron.features.peers.options:SLOTS",
    },
    METRIC: {  # see megatron.report.sink
        "jsonl": "megatron.report.jsonl:MetricsFile",
        "tensorboard": "megatron.report.tensorboard:TensorBoard",
        "wandb": "megatron.report.weights_and_biases:WeightsAndBiases",
    },
    ARCHITECTURE: {
        name: f"megatron.checkpoint.hf.architectures.{module}:{name.removesuffix('_text').upper()}"
        for module, name in (word.split(":") for word in " ".join(_ARCHITECTURES).split())
    },
    RUNNER: {  # see megatron.launch.runner
        "local": "megatron.launch.runners.ssh:LOCAL",
        "ssh": "megatron.launch.runners.ssh:SSH",
        "pdsh": "megatron.launch.runners.ssh:PDSH",
        "openmpi": "megatron.launch.runners.mpi:OPENMPI",
        "mpich": "megatron.launch.runners.mpi:MPICH",
        "slurm": "megatron.launch.runners.slurm:RUNNER",
        "torchrun": "megatron.launch.runners.torchrun:RUNNER",
    },
    SCORER: {},  # of contributions (docs/peers.md).
    # Checks of a script's own options before any rank starts: (words, config) -> a sentence for each mistake.
    "check": {
        "align": "megatron.features.align.check:before_start",
        "evaluate": "megatron.evaluation.arguments:before_start",
        "extract": "megatron.evaluation.memorisation.arguments:before_start",
        "train": "megatron.evaluation.arguments:before_training",
    },
    # The parser of a script's own options, whose help stands below the launcher's.
    "options": {
        "evaluate": "megatron.evaluation.arguments:parser",
        "extract": "megatron.evaluation.memorisation.arguments:parser",
    },
}
D = TypeVar("D")
ADDED = {HOOK: "hooks", METRIC: "logging.sinks"}  # roles whose names inside have keys of their own, and where others go
PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class RegistryError(RuleError):
    """A name or an extension that cannot be used."""


@dataclass(frozen=True)
class Registry:
    """The names of each role, and what they stand for."""

    tables: Mapping[str, Mapping[str, str]]  # import paths by role and name
    extensions: tuple[str, ...] = ()  # the modules that have added to the tables inside

    def names(self, role: str) -> tuple[str, ...]:
        """In the order in which they are listed: those inside first."""
        return tuple(self.tables[role])

    def path(self, role: str, name: str) -> str:
        """The import path behind a name. A name with a colon is an import path itself.

        Raises:
            RegistryError: nothing has this name.
        """
        if name in self.tables[role]:
            return self.tables[role][name]
        if ":" in name:
            return name
        near = difflib.get_close_matches(name, self.names(role), n=1)
        known = f"the names are {', '.join(self.names(role))}"
        raise RegistryError(
            f"{name!r} must be the name of one {role} that is known",
            f"did you mean {near[0]}? {known}" if near else f"{known}, or list the extension that has it",
        )

    def load(self, role: str, name: str) -> Any:
        """Import what a name stands for.

        Raises:
            RegistryError: nothing has this name, or it cannot be imported.
        """
        return load(self.path(role, name))

    def extended(self, module: str) -> Registry:
        """With the names of one more extension.

        Raises:
            RegistryError: there is no such module, it cannot be imported, or it does not say what it adds.
        """
        tables = {role: dict(table) for role, table in self.tables.items()}
        for role, name, path in _declared(module, tuple(tables)):
            if tables[role].get(name, path) != path:
                raise RegistryError(
                    f"extension {module} must not name its {role} {name!r}, which stands for {tables[role][name]}",
                    "give it another name in the extension's EXTENSION",
                )
            tables[role][name] = path
        return Registry(tables, (*self.extensions, module))


@cache
def load(path: str) -> Any:
    """The object at "package.module:attribute".

    Raises:
        RegistryError: no such module or attribute, or the module fails when it is imported.
    """
    if not PATH.fullmatch(path):
        raise RegistryError(f"{path!r} must be an import path", "write it as package.module:attribute")
    module, _, attribute = path.partition(":")
    found = _imported(module)
    if not hasattr(found, attribute):
        raise RegistryError(f"module {module} must have {attribute}", f"define {attribute} there, or fix the path")
    return getattr(found, attribute)


def _imported(module: str) -> Any:
    if not _MODULE.fullmatch(module):
        raise RegistryError(f"{module!r} must be the name of a Python module", "write it as package.module")
    if is_strange(module):
        raise RegistryError(f"{RULE}, and one names {module}", how_to_admit([module]))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            fix = "install the package that has it, or put its folder into PYTHONPATH, on every host"
            raise RegistryError(f"module {module} must be found by Python", fix) from None
        raise RegistryError(f"module {module} must be importable, and it needs {error.name}", "install that") from error
    except Exception as error:  # whatever a user's module does
        rule = f"module {module} must be importable, and it fails with {type(error).__name__}: {error}"
        raise RegistryError(rule, f"fix it until `python -c 'import {module}'` works") from error


def _declared(module: str, roles: tuple[str, ...]) -> Iterable[tuple[str, str, str]]:
    """Role, name and import path of each thing that an extension adds."""
    tables = getattr(_imported(module), "EXTENSION", None)
    if not isinstance(tables, Mapping):
        raise RegistryError(
            f"extension {module} must have a mapping EXTENSION of roles to names to import paths",
            'write for example EXTENSION = {"kind": {"retention": "my_lab.retention.options:KIND"}}',
        )
    for role, table in tables.items():
        if role not in roles:
            raise RegistryError(f"extension {module} names the unknown role {role!r}", f"use one of {', '.join(roles)}")
        if not isinstance(table, Mapping):
            raise RegistryError(f"EXTENSION[{role!r}] of {module} must map names to import paths", "fix it there")
        for name, path in table.items():
            if not (isinstance(name, str) and name.isidentifier() and isinstance(path, str) and PATH.fullmatch(path)):
                rule = f"EXTENSION[{role!r}][{name!r}] of {module} must give a plain name an import path"
                raise RegistryError(rule, "write it as package.module:attribute")
            yield role, name, path


@cache
def registry_of(extensions: tuple[str, ...] = ()) -> Registry:
    """All names, with the names of extensions (modules, in the order of `model.extensions`).

    Raises:
        RegistryError: of the first extension that cannot be used.
    """
    if not extensions:
        return Registry(INSIDE)
    return registry_of(extensions[:-1]).extended(extensions[-1])


def description_of(role: str, name: str, extensions: tuple[str, ...], kind: type[D]) -> D | None:
    """The object that a name of an optimizer or an objective stands for. None: it stands for a class, whose module may
    need torch, or for nothing that can be imported."""
    try:
        registry = registry_of(extensions)
        named = registry.path(role, name).partition(":")[2].isupper()
        found = registry.load(role, name) if named else None
    except RegistryError:
        return None  # rules/model.py reports it
    return found if isinstance(found, kind) else None


def descriptions_inside(role: str, kind: type[D]) -> dict[str, D]:
    """The descriptions of a role in this package, by name."""
    found = {name: description_of(role, name, (), kind) for name in INSIDE[role]}
    return {name: each for name, each in found.items() if each is not None}


def offered_by(role: str, name: str) -> str | None:
    """The module of the installed extension that offers this name by an entry point, or None if none does."""
    return next(iter(sorted(each.value for each in _entry_points(role, tuple(sys.path)) if each.name == name)), None)


def is_offered(module: str) -> bool:
    """Whether an installed package offers this module as an extension."""
    return any(each.value == module for role in INSIDE for each in _entry_points(role, tuple(sys.path)))


@cache
def _entry_points(role: str, search: tuple[str, ...]) -> EntryPoints:
    """The offers of installed packages for a role, read once for each search path, which takes some milliseconds."""
    from importlib.metadata import entry_points  # slow to import, and an agent does without

    return entry_points(group=f"deepy.{role}")
