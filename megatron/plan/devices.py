"""Devices and networks: what a plan knows of machines that need not be here. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.config.problems import ConfigError, Problem
from megatron.parallel.messages.curve import CostCurve
from megatron.report.peaks import device_peak

FILE = Path(__file__).with_name("devices.yml")

Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(gt=0, le=10**6)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Interconnect(_Entry):
    """Between the devices of a host.

    Attributes:
        bandwidth: GB/s that a device sends while it receives as much.
        latency: microseconds of each hop.
    """

    bandwidth: Positive
    latency: Positive


class Efficiency(_Entry):
    """What kernels reach: shares of the peak rate (`matrix`, `attention`) and of the memory's bandwidth."""

    matrix: Share
    attention: Share
    memory: Share


class HostTime(_Entry):
    """What a CPU's steps take beside their FLOPs, in microseconds of each.

    Attributes:
        operation: that torch is asked for.
        collective: call.
        send: or reception.
        gather: of a tensor of parameters by ZeRO 3, with all that DeepSpeed does for it.
        step: whatever is in it.
    """

    operation: NotNegative
    collective: NotNegative
    send: NotNegative
    gather: NotNegative
    step: NotNegative


class Device(_Entry):
    """One device as torch sees it; `devices.yml` has the units."""

    name: str
    memory: Positive
    bandwidth: Positive
    watts: Positive
    per_host: Count
    units: Count
    link: Interconnect
    efficiency: Efficiency
    launch: Positive
    host: HostTime | None = None
    tflops: dict[str, Positive] | None = None

    def peak(self, compute: str) -> float:
        """FLOP/s of dense matrix products.

        Raises:
            ConfigError: nobody says what the device reaches in this type.
        """
        found = (self.tflops or {}).get(compute) or device_peak(self.name, compute).tflops
        if found is None:
            rule = f"the peak rate of {self.name} in {compute} must be known to predict times"
            raise ConfigError([Problem(f"devices.{self.name}.tflops", rule, f"give tflops: {{{compute}: ...}}")])
        return found * 1e12

    @property
    def bytes(self) -> float:
        """What a process can use of its memory."""
        return self.memory * 2**30


class Network(_Entry):
    """Between hosts.

    Attributes:
        bandwidth: GB/s of each adapter, in one direction.
        adapters: of a host.
        latency: microseconds of each hop.
    """

    bandwidth: Positive
    adapters: Count
    latency: Positive


class _Machines(_Entry):
    devices: dict[str, Device] = Field(default_factory=dict)
    networks: dict[str, Network] = Field(default_factory=dict)
    measured: dict[str, Any] = Field(default_factory=dict)  # where and when the collectives were measured
    collectives: list[Any] = Field(default_factory=list)


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal devices.

    Attributes:
        devices: in all.
        per_host: devices of a host.
        curves: collectives as they were measured there; where there is one, nothing is calculated.
    """

    device: Device
    network: Network
    devices: int
    per_host: int
    curves: tuple[CostCurve, ...] = ()

    @property
    def hosts(self) -> int:
        return -(-self.devices // self.per_host)


@cache
def known_devices(path: str | None = None) -> tuple[Mapping[str, Device], Mapping[str, Network]]:
    """All devices and networks by name: those inside, and on top of them those of a file.

    Raises:
        ConfigError: the file cannot be read, or is not of this form.
    """
    machines = _read(FILE)
    if path is None:
        return machines.devices, machines.networks
    own = _read(Path(path))
    return {**machines.devices, **own.devices}, {**machines.networks, **own.networks}


@cache
def measured(path: str | None) -> tuple[CostCurve, ...]:
    """The collectives of a file, as bench/communication.py has measured them.

    Raises:
        ConfigError: the file cannot be read, or is not of this form.
    """
    if path is None:
        return ()
    try:
        return tuple(map(CostCurve.of, _read(Path(path)).collectives))
    except ValueError as error:
        fix = "measure again with bench/communication.py"
        raise ConfigError([Problem("collectives", f"must be right: {error}", fix, where=path)]) from None


def _read(path: Path) -> _Machines:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it must have the keys `devices` and `networks`")
        return _Machines.model_validate(values)
    except ValidationError as error:
        fix = "megatron/plan/devices.yml shows the form of an entry"
        raise ConfigError([
            Problem(".".join(map(str, each["loc"])), f"must be right: {each['msg']}", fix, where=str(path))
            for each in error.errors()
        ]) from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
        rule = f"the file of machines must be readable YAML: {error}"
        raise ConfigError([Problem("--machine", rule, "name a file as megatron/plan/devices.yml", str(path))]) from None


T = TypeVar("T")


def _named(choices: Mapping[str, T], option: str, name: str) -> T:
    if name not in choices:
        rule = f"must be one of {', '.join(choices)}"
        raise ConfigError([Problem(option, rule, "describe another one in a file and give --machine FILE", name)])
    return choices[name]


def cluster(
    devices: int, gpu: str, hosts: int | None = None, network: str | None = None, path: str | None = None
) -> Cluster:
    """The machine that a user asks about.

    Args:
        devices: in all.
        gpu: a device's name in the table.
        hosts: None takes as few hosts as can have the devices.
        network: a network's name; None is ib400 (on one host no network is used).
        path: of a file with further devices and networks, and with measured collectives.

    Raises:
        ConfigError: a name is not known, or devices cannot be spread evenly over the hosts.
    """
    of_devices, of_networks = known_devices(path)
    device, net = _named(of_devices, "--gpu", gpu), _named(of_networks, "--network", network or "ib400")
    per_host = min(device.per_host, devices) if hosts is None else -(-devices // hosts)
    if devices % per_host or (hosts is not None and per_host * hosts != devices):
        count = hosts or -(-devices // per_host)
        below = devices // count * count
        rule = f"{devices} devices must fill the hosts evenly; {count} hosts cannot have equal numbers of them"
        fix = f"ask for {' or '.join(str(each) for each in (below, below + count) if each)} devices, or give --hosts"
        raise ConfigError([Problem("--gpus", rule, fix, devices)])
    return Cluster(device, net, devices, per_host, measured(path))


def describe_cluster(at: Cluster) -> dict[str, Any]:
    """For reports: what the figures rest on."""
    return {
        "device": at.device.model_dump(),
        "network": at.network.model_dump(),
        "devices": at.devices,
        "hosts": at.hosts,
        "per_host": at.per_host,
        "measured_collectives": len(at.curves),
    }
