"""Which environment variables go along to the ranks of other hosts, and how they are shown."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

# Variables that change how libraries work, and none that belongs to one machine.
ALWAYS = tuple(
    (
        "NCCL_* RCCL_* GLOO_* UCX_* FI_* TORCH_* PYTORCH_* TORCHINDUCTOR_* TRITON_* CUDA_* HIP_* HSA_* MIOPEN_* "
        "OMP_* MKL_* KMP_* HF_* TRANSFORMERS_* TOKENIZERS_* WANDB_* DS_* DEEPSPEED_* PYTHON* LD_LIBRARY_PATH "
        "LD_PRELOAD MALLOC_* XDG_CACHE_HOME"
    ).split()
)
NEVER = tuple("CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES PYTHONHOME OMPI_* PMI* SLURM_*".split())
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def forwarded(environment: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """The forwarded variables: the usual ones, and variables that `launch.forward` names."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if _any(name, patterns) or (_any(name, ALWAYS) and not _any(name, NEVER))
    }


def read_file(path: str | Path) -> dict[str, str]:
    """Variables of a file of `NAME=value` lines. Blank lines and lines that start with # do not count. Nothing is
    expanded, and quotes are part of the value.

    Raises:
        ValueError: a line that is neither, with its number.
        OSError: the file cannot be read.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise ValueError(f"{path}:{number}: {line!r} is not NAME=value")
        found[name.strip()] = value
    return found


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """For eyes and logs: secrets are blotted out."""
    return {name: "********" if _SECRET.search(name) else value for name, value in environment.items()}
