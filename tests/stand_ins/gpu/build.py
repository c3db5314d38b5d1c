"""Builds the stand-in of a GPU from `device.cpp`, and says how a process starts on it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
NEEDED = re.compile(r"\b(?:__cuda[A-Z]|cuda[A-Z]|cublas[A-Z]|nccl[A-Z])\w*")
# Of cuBLAS, these set something up. The others compute.
PREPARES = re.compile(r"cublas(?:Lt)?\w*(?:Create|Destroy|Set|Get)")


def build(folder: Path) -> dict[str, str]:
    """Compile the library into a folder. The environment of a process that runs on it."""
    import triton

    library = folder / "libcuda.so.1"
    if not library.exists():
        own, generated = folder / "device.o", folder / "generated.cpp"
        include = Path(triton.__file__).parent / "backends/nvidia/include"
        compiler = ["g++", "-O1", "-fPIC", "-std=c++17"]
        subprocess.run([*compiler, f"-I{include}", "-c", HERE / "device.cpp", "-o", own], check=True)
        generated.write_text(_generated(_symbols("--defined-only", own)))
        linked = folder / "linked.so"
        # torch asks for the functions of NVRTC's library by its name
        name = "-Wl,-soname,libnvrtc.so.13"
        subprocess.run([*compiler, "-shared", name, own, generated, "-o", linked, "-ldl"], check=True)
        (folder / "libcuda.so").symlink_to(library.name)
        linked.rename(library)
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(folder),  # where Triton searches for the driver
        "TRITON_LIBCUDA_PATH": str(folder),
        "OMP_NUM_THREADS": "1",
    }


def _generated(own: set[str]) -> str:
    """Functions that only succeed, for all that torch's libraries need and `device.cpp` does not have."""
    libraries = Path(torch.__file__).parent / "lib"
    needed: set[str] = set()
    for name in ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so"):
        needed |= _symbols("--undefined-only", libraries / name)
    lines = ['extern "C" int stand_in_call(const char *, const char *);']
    for name in sorted(needed - own):
        computes = name.startswith("cublas") and not PREPARES.match(name)
        call = f'stand_in_call("kernel", "{name}")' if computes else "0"
        lines.append(f'extern "C" __attribute__((visibility("default"))) int {name}() {{ return {call}; }}')
    return "\n".join(lines) + "\n"


def _symbols(kind: str, library: Path) -> set[str]:
    listed = subprocess.run(["nm", *(() if library.suffix == ".o" else ("-D",)), kind, library], **_TEXT).stdout
    return set(NEEDED.findall(listed))


_TEXT: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "env": {**os.environ, "LC_ALL": "C"}}
