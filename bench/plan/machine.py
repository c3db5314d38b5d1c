"""Measure what one device reaches, for the plan: products, attention, memory, launches.

    python -m bench machine --name mine [--like h100] [--types bf16,fp32] [--output machine.yml] [--json]
    OMP_NUM_THREADS=1 python -m bench machine --name mine --like cpu --clock cpu
    OMP_NUM_THREADS=1 python -m bench machine --name mine --like cpu --host        with two idle cores

Adds an entry of `devices` to machine.yml, for `tools/plan.py --gpu mine --machine machine.yml`. Matrix products have
the shapes of transformers with --widths channels. Each figure is the median of rounds, and in each of repetitions after
a warm-up. On a GPU events give the times. On a CPU with other work they are better taken of the processor's time, on
one thread (--clock cpu). Some figures cannot be measured: watts, units, devices of a host and the link between them.
They are copied from the known device that --like names. With --host small models make steps
on one and two ranks, and what a CPU takes for each operation and message is found too (bench/plan/host_time.py). Then
a rehearsal on this device also says how long a step takes. Collectives are measured by
bench/communication.py into the same file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from bench.messages.collectives import times_of
from bench.messages.curves import put
from bench.runner import Result, share
from megatron.config.problems import UserError
from megatron.plan.devices import Device, known_devices
from megatron.plan.step import product_rate
from megatron.report.peaks import device_peak

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COPIED = 256 << 20  # bytes
ATTENTION = (1, 8, 1024, 64)  # samples, heads, tokens, channels of a head


@dataclass
class MeasuredMachine:
    """What was measured.

    Attributes:
        products: by type, [(m, n, k, seconds)].
        attention: by type, FLOP/s of causal attention, half of the square.
        bandwidth: bytes per second that a copy reads and writes.
        launch: seconds of an operation on one number.
        memory: bytes.
    """

    name: str
    memory: int
    bandwidth: float = 0.0
    launch: float = 0.0
    products: dict[str, list[tuple[int, int, int, float]]] = field(default_factory=dict)
    attention: dict[str, float] = field(default_factory=dict)


def figures(
    device: torch.device, types: list[str], widths: list[int], tokens: int, repeat: int, clock: str = "wall"
) -> MeasuredMachine:
    """Take the times, once."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if module is not None:
        memory = module.get_device_properties(device).total_memory
    found = MeasuredMachine("cpu" if module is None else module.get_device_name(device), memory)

    def seconds(run: Callable[[], Any]) -> float:
        times_of(device, run, 2)
        return statistics.median((processor_times if clock == "cpu" else times_of)(device, run, repeat))

    one = torch.ones(1, device=device)
    found.launch = seconds(partial(one.add_, 1))
    source = torch.ones(COPIED // 4, device=device)
    found.bandwidth = 2 * COPIED / seconds(partial(torch.empty_like(source).copy_, source))
    del source
    for name in types:
        kind = TYPES[name]
        found.products[name] = []
        for width in widths:
            for n, k in ((3 * width, width), (4 * width, width), (width, 4 * width)):
                x, w = torch.ones(tokens, k, device=device, dtype=kind), torch.ones(n, k, device=device, dtype=kind)
                found.products[name].append((tokens, n, k, seconds(partial(F.linear, x, w))))
        q = torch.ones(ATTENTION, device=device, dtype=kind)
        samples, heads, length, channels = ATTENTION
        time = seconds(partial(F.scaled_dot_product_attention, q, q, q, is_causal=True))
        found.attention[name] = 2 * samples * heads * length**2 * channels / time
    return found


def processor_times(device: torch.device, run: Callable[[], Any], count: int) -> list[float]:
    """Processor seconds of each of many operations of this process."""
    marks = [time.process_time()]
    for _ in range(count):
        run()
        marks.append(time.process_time())
    return [b - a for a, b in zip(marks, marks[1:])]


def middle(found: list[MeasuredMachine]) -> MeasuredMachine:
    """The medians of rounds."""
    first, median = found[0], statistics.median
    products = {
        name: [
            (*shapes[0][:3], median(each[3] for each in shapes))
            for shapes in zip(*(one.products[name] for one in found))
        ]
        for name in first.products
    }
    attention = {name: median(each.attention[name] for each in found) for name in first.attention}
    bandwidth, launch = median(each.bandwidth for each in found), median(each.launch for each in found)
    return MeasuredMachine(first.name, first.memory, bandwidth, launch, products, attention)


def entry(found: MeasuredMachine, like: Device) -> dict[str, Any]:
    """Entry of `devices`. A type's peak is of the data sheet, or else the best rate of all products, free of waves.

    Shares of the peak are of the first type. The plan scales its rate for the others.
    """
    peaks, shares = {}, {}
    for name, products in found.products.items():
        rates = [2 * m * n * k / seconds / product_rate(m, n, k, 1, like.units) for m, n, k, seconds in products]
        peaks[name] = (device_peak(found.name, name).tflops or 0) * 1e12 or max(rates)
        shares[name] = min(1.0, statistics.median(rates) / peaks[name])
    first = next(iter(found.products))
    efficiency = {
        "matrix": rounded(shares[first]),
        "attention": rounded(min(1.0, found.attention[first] / peaks[first])),
        "memory": 1.0,
    }
    return {
        "name": found.name,
        "memory": rounded(found.memory / 2**30),
        "bandwidth": rounded(found.bandwidth / 1e9),
        "watts": like.watts,
        "per_host": like.per_host,
        "units": like.units,
        "link": like.link.model_dump(),
        "efficiency": efficiency,
        "launch": rounded(found.launch * 1e6),
        "tflops": {name: rounded(peak / 1e12) for name, peak in peaks.items()},
    }


def rounded(value: float) -> float:
    """To four digits."""
    return float(f"{value:.4g}")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="measured", help="of the entry (default measured)")
    parser.add_argument("--like", help="the known device that it is like (default: cpu, or h100 on a GPU)")
    parser.add_argument("--types", default="", help="of fp32, bf16, fp16 (default: fp32 on a CPU, else bf16,fp32)")
    parser.add_argument("--widths", default="", help="channels (default 256,512 on a CPU, else 1024,2048,4096,8192)")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--host", action="store_true", help="of a CPU: also what each operation and message takes")
    parser.add_argument("--output", default="machine.yml", help="where the entry goes (default machine.yml)")
    share(parser, "--rounds", "--clock", rounds=3)


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """The options with what follows from the device.

    Raises:
        UserError: a value is out of range.
    """
    gpu = torch.cuda.is_available()
    options.device = torch.device("cuda" if gpu else "cpu")
    options.like = options.like or ("h100" if gpu else "cpu")
    options.types = (options.types or ("bf16,fp32" if gpu else "fp32")).split(",")
    words = (options.widths or ("1024,2048,4096,8192" if gpu else "256,512")).split(",")
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= 2**16 for word in words):
        raise UserError(f"--widths must be numbers from 1 to 65536, not {options.widths}")
    options.widths = [int(word) for word in words]
    if wrong := [each for each in options.types if each not in TYPES]:
        raise UserError(f"--types must be of {', '.join(TYPES)}, not {', '.join(wrong)}")
    if options.tokens < 1 or options.repeat < 3 or options.rounds < 1:
        raise UserError("--tokens and --rounds must be at least 1, and --repeat at least 3")
    if options.host and gpu:
        raise UserError("--host is for CPUs: kernels of a GPU are launched while others compute")
    if options.clock == "cpu" and gpu:
        raise UserError("--clock cpu is for CPUs: a GPU's own events say how long it works")
    return options


def measure(given: argparse.Namespace) -> Result:
    """Measure, and write machine.yml."""
    options = checked(given)
    if options.host:  # its ranks have one thread each, and so must the products that their FLOPs are taken from
        torch.set_num_threads(1)
    devices = known_devices()[0]
    if options.like not in devices:
        raise UserError(f"--like must be one of {', '.join(devices)}, not {options.like}")
    how = (options.device, options.types, options.widths, options.tokens, options.repeat, options.clock)
    found = middle([figures(*how) for _ in range(options.rounds)])
    device = Device.model_validate(entry(found, devices[options.like]))
    if options.host:
        from bench.plan.host_time import measure as of_host

        device = device.model_copy(update={"host": of_host(device, options.rounds)})
    made = device.model_dump(exclude_none=True)
    put(options.output, {"devices": {options.name: made}})
    lines = []
    for name, products in found.products.items():
        for m, n, k, seconds in products:
            lines.append(f"{name}  {m} x {k} by {k} x {n}: {2 * m * n * k / seconds / 1e12:.4g} TFLOP/s")
        lines.append(f"{name}  causal attention of {ATTENTION[2]} tokens: {found.attention[name] / 1e12:.4g} TFLOP/s")
    lines.append(f"copy: {found.bandwidth / 1e9:.4g} GB/s   launch: {found.launch * 1e6:.3g} us")
    if device.host is not None:
        lines.append("host, us: " + ", ".join(f"{name} {value:g}" for name, value in device.host.model_dump().items()))
    lines.append(f"written: {options.output}, device {options.name}")
    return Result({"device": made, "products": found.products, "attention": found.attention}, "\n".join(lines))
