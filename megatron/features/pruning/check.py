"""The rule of masks that a file breaks: `python -m megatron.features.pruning.check < configuration.json`.

The names and shapes of a model's matrices need torch, which a launcher does not import."""

import json
import sys
from pathlib import Path

from megatron.checkpoint import CheckpointError
from megatron.config.schema import using_extensions

from .masks import masks_of, matrices_of, of_file
from .options import pruning_of

LARGE = 2**31  # bytes of a file from which only ranks read its values


def broken_rule(text: str) -> str:
    """Empty where the file of `pruning.mask` can be used by this configuration, as JSON."""
    values = json.loads(text)
    with using_extensions(tuple(values["model"]["extensions"])) as schema:
        config = schema.model_validate(values)
    options = pruning_of(config)
    try:
        matrices, path = matrices_of(config), Path(options.mask or "")
        names, read = of_file(path, matrices)
        if path.stat().st_size < LARGE:
            for _ in masks_of(options, matrices, names, read):
                pass
    except CheckpointError as error:
        return "; ".join(error.problems)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError):
        return ""  # no model can be made of this configuration: another rule says why
    return ""


if __name__ == "__main__":
    print(json.dumps(broken_rule(sys.stdin.read())))
