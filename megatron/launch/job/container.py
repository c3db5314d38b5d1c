"""Agents, and with them the ranks, in a container: `launch.container`, the tool and the image as `apptainer:PATH`.

The launcher itself stays outside: it needs no torch. The folder of the code and the run's working directory have the
same paths inside. Further folders are named in `launch.container_mounts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.worker.code_version import root

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection


def inside(agent: list[str], directory: str, launch: LaunchSection) -> list[str]:
    """An agent's command, in the container if there is one. pyxis is an addition to srun: see `srun_options`."""
    tool, _, image = (launch.container or "").partition(":")
    mounts = _mounts(directory, launch)
    if tool == "apptainer":
        gpus = [] if launch.device == "cpu" else ["--rocm" if launch.batch.gpus == "amd" else "--nv"]
        binds = [word for mount in mounts for word in ("--bind", mount)]
        return ["apptainer", "exec", *gpus, *binds, "--pwd", directory, image, *agent]
    if tool == "enroot":
        return ["enroot", "start", *(word for mount in mounts for word in ("--mount", mount)), image, *agent]
    return agent


def srun_options(directory: str, launch: LaunchSection) -> list[str]:
    """Options of srun where pyxis makes the container."""
    tool, _, image = (launch.container or "").partition(":")
    if tool != "pyxis":
        return []
    mounts = ",".join(_mounts(directory, launch))
    return [f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={directory}"]


def _mounts(directory: str, launch: LaunchSection) -> list[str]:
    own = [f"{folder}:{folder}" for folder in dict.fromkeys((str(root()), directory))]
    return [*own, *(mount if ":" in mount else f"{mount}:{mount}" for mount in launch.container_mounts)]
