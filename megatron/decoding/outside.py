"""Options for models whose experts stay outside of the device's memory, and the models that can.

A kind of layers with experts names the class that fetches them (`LayerKind.fetches`)."""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config
from megatron.config.problems import UserError
from megatron.config.registry import load
from megatron.config.variants import used_kinds
from megatron.model.stack import Model, ModelPlan

from .covered import obstacle

CALIBRATION = (4, 64)  # texts and tokens of each, drawn by key: results depend on no other text


def add_expert_options(add: Callable[..., Any]) -> None:
    held = "experts of each layer in memory, the others are fetched when a router chooses them (default: all)"
    add("--experts-held", type=int, metavar="N", help=held)
    folder = "write the experts into files here, which are mapped (default: on a GPU the host's memory, else TMPDIR)"
    add("--experts-folder", type=Path, metavar="FOLDER", help=folder)
    guess = "with --experts-held: use the experts that are predicted and fetched ahead (faster, another text)"
    add("--experts-guessed", action="store_true", help=guess)


@dataclass(frozen=True)
class Outside:
    """Experts outside of a device."""

    held: int  # experts of each layer on it
    folder: Path | None  # of mapped files. None: the host's memory.
    guessed: bool  # use the predicted experts

    @classmethod
    def of(cls, options: argparse.Namespace, device: torch.device) -> "Outside | None":
        """None where the options want all experts on the device.

        Raises:
            UserError: an option is wrong. The text has the rule.
        """
        held, folder = options.experts_held, options.experts_folder
        if held is None:
            if folder is not None or options.experts_guessed:
                raise UserError("--experts-folder and --experts-guessed need --experts-held")
            return None
        if held < 1:
            raise UserError(f"--experts-held is {held}: it must be at least 1")
        if folder is not None and not folder.is_dir():
            raise UserError(f"--experts-folder must be a folder that exists: {folder}")
        if options.no_cache or options.tolerance is not None:
            raise UserError("--experts-held must be without --no-cache and --tolerance, which read whole texts")
        if folder is None and device.type == "cpu":
            folder = Path(tempfile.gettempdir())
        return cls(held, folder, options.experts_guessed)

    def obstacle(self, config: Config, ranks: int) -> str | None:
        """The reason why the experts of such a run stay on the device."""
        if not _classes(config):
            return f"model.layers must have layers with experts: {config.model.layers}"
        if ranks > 1:
            return f"one process must have the whole text, and there are {ranks}"
        if config.precision.products != "compute":
            return "scales of 8-bit products would depend on the experts that are held (precision.products)"
        return obstacle(config)

    def plan(self, config: Config) -> Callable[..., ModelPlan]:
        (fetching,) = _classes(config)
        return partial(load(fetching).Plan, folder=self.folder)

    def install(self, model: Model) -> Any:
        """Fetch the experts of a model of `plan` from now on. Returns an object whose `report()` is a sentence."""
        (fetching,) = _classes(model.plan.config)
        found = load(fetching)(model, self.held, self.guessed)
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.plan.config.model.vocab_size, CALIBRATION, generator=draw)
        found.calibrate(model, tokens.to(model.plan.device))
        return found


def _classes(config: Config) -> set[str]:
    return {kind.fetches for _, kind, _ in used_kinds(config.model) if kind.fetches}
