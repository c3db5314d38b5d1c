"""Devices and networks that a plan can assume. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """Links between the devices of a host."""

    bandwidth: Positive  # GB/s in each direction, both at the same time
    latency: Positive  # microseconds of each hop


class Efficiency(_Entry):
    """Efficiency of kernels: shares of the peak rate (`matrix`, `attention`) and of the memory's bandwidth."""

    matrix: Share
    attention: Share
    memory: Share


class HostTime(_Entry):
    """Costs of a CPU's step in addition to its FLOPs, in microseconds."""

    operation: NotNegative  # per operation of torch
    collective: NotNegative  # per call
    send: NotNegative  # per send or receive
    gather: NotNegative  # per tensor of parameters that ZeRO 3 gathers, with all of DeepSpeed's work for it
    step: NotNegative  # per step


class Device(_Entry):
    """One device as torch sees it. `devices.yml` has the units."""

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
            ConfigError: the device's peak in this type is not known.
        """
        found = (self.tflops or {}).get(compute) or device_peak(self.name, compute).tflops
        if found is None:
            rule = f"the peak rate of {self.name} in {compute} must be known to predict times"
            raise ConfigError([Problem(f"devices.{self.name}.tflops", rule, f"give tflops: {{{compute}: ...}}")])
        return found * 1e12

    @property
    def bytes(self) -> float:
        """Memory that a process can use."""
        return self.memory * 2**30


class Network(_Entry):
    """Network between hosts."""

    bandwidth: Positive  # GB/s of each adapter, in one direction
    adapters: Count  # per host
    latency: Positive  # microseconds of each hop


class _Machines(_Entry):
    devices: dict[str, Device] = Field(default_factory=dict)
    networks: dict[str, Network] = Field(default_factory=dict)
    measured: dict[str, Any] = Field(default_factory=dict)  # where and when the collectives were measured
    collectives: list[Any] = Field(default_factory=list)


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal devices."""

    device: Device
    network: Network
    devices: int  # in all
    per_host: int  # devices of a host
    curves: tuple[CostCurve, ...] = ()  # measured collectives, which replace the formulas

    @property
    def hosts(self) -> int:
        return -(-self.devices // self.per_host)

    def sized(self, devices: int) -> "Cluster":
        """The same machine with another number of devices."""
        return replace(self, devices=devices, per_host=min(self.per_host, devices))


@cache
def known_devices(path: str | None = None) -> tuple[Mapping[str, Device], Mapping[str, Network]]:
    """All devices and networks by name: the built-in ones, overlaid with those in a file.

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
    """The collectives in a file that bench/communication.py has measured.

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
        hosts: None uses the fewest hosts that can have the devices.
        network: a network's name. None is ib400 (on one host no network is used).
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
        rule = f"{devices} devices must fill the hosts evenly: {count} hosts cannot have equal numbers of them"
        fix = f"ask for {' or '.join(str(each) for each in (below, below + count) if each)} devices, or give --hosts"
        raise ConfigError([Problem("--gpus", rule, fix, devices)])
    return Cluster(device, net, devices, per_host, measured(path))


def describe_cluster(at: Cluster) -> dict[str, Any]:
    """The machine that the figures assume, for reports."""
    return {
        "device": at.device.model_dump(),
        "network": at.network.model_dump(),
        "devices": at.devices,
        "hosts": at.hosts,
        "per_host": at.per_host,
        "measured_collectives": len(at.curves),
    }
