"""Peak arithmetic rates of devices, for model FLOP utilisation (MFU).

Dense rates (no sparsity) of matrix units with fp32 accumulation, per device as torch sees it, from the vendors' data
sheets. An MI250X card is two devices to torch, so its rate is half the card's."""

from dataclasses import dataclass

# Words that a device's name must contain (lower case), and TFLOP/s by type. The first row that fits counts, so
# variants stand before the plain name.
TABLE: tuple[tuple[tuple[str, ...], dict[str, float]], ...] = (
    (("gb200",), {"bf16": 2500, "fp16": 2500, "fp32": 80}),
    (("b200",), {"bf16": 2250, "fp16": 2250, "fp32": 75}),
    (("h200", "nvl"), {"bf16": 835, "fp16": 835, "fp32": 60}),
    (("h200",), {"bf16": 989, "fp16": 989, "fp32": 67}),
    (("h100", "pcie"), {"bf16": 756, "fp16": 756, "fp32": 51}),
    (("h100", "nvl"), {"bf16": 835, "fp16": 835, "fp32": 60}),
    (("h100",), {"bf16": 989, "fp16": 989, "fp32": 67}),
    (("gh200",), {"bf16": 989, "fp16": 989, "fp32": 67}),
    (("h800",), {"bf16": 989, "fp16": 989, "fp32": 67}),
    (("h20",), {"bf16": 148, "fp16": 148, "fp32": 44}),
    (("a100",), {"bf16": 312, "fp16": 312, "fp32": 19.5}),
    (("a800",), {"bf16": 312, "fp16": 312, "fp32": 19.5}),
    (("a30",), {"bf16": 165, "fp16": 165, "fp32": 10.3}),
    (("a40",), {"bf16": 149.7, "fp16": 149.7, "fp32": 37.4}),
    (("l40s",), {"bf16": 362, "fp16": 362, "fp32": 91.6}),
    (("l40",), {"bf16": 181, "fp16": 181, "fp32": 90.5}),
    (("l4",), {"bf16": 121, "fp16": 121, "fp32": 30.3}),
    (("v100",), {"fp16": 125, "fp32": 15.7}),
    (("t4",), {"fp16": 65, "fp32": 8.1}),
    (("mi355x",), {"bf16": 2500, "fp16": 2500, "fp32": 157.3}),
    (("mi325x",), {"bf16": 1307, "fp16": 1307, "fp32": 163.4}),
    (("mi300x",), {"bf16": 1307, "fp16": 1307, "fp32": 163.4}),
    (("mi300a",), {"bf16": 980.6, "fp16": 980.6, "fp32": 122.6}),
    (("mi250x",), {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9}),
    (("mi250",), {"bf16": 181, "fp16": 181, "fp32": 45.3}),
    (("mi210",), {"bf16": 181, "fp16": 181, "fp32": 45.3}),
    (("mi100",), {"bf16": 92.3, "fp16": 184.6, "fp32": 46.1}),
)


@dataclass(frozen=True)
class Peak:
    """A device's peak in TFLOP/s, or None. `source` is its source, or the reason why there is none."""

    tflops: float | None
    source: str


def device_peak(device: str, compute: str, given: float | None = None) -> Peak:
    """The peak of one device.

    Args:
        device: name from `torch.cuda.get_device_name()`, or "cpu".
        given: `logging.peak_tflops`, which takes precedence.
    """
    if given is not None:
        return Peak(given, "logging.peak_tflops")
    words = device.lower().replace("-", " ").replace("_", " ").split()
    for needed, rates in TABLE:
        if all(word in words for word in needed):
            if compute not in rates:
                return Peak(None, f"{device} has no {compute} peak in the table (set logging.peak_tflops)")
            return Peak(rates[compute], f"{device}, {compute}, dense")
    return Peak(None, f"the peak of {device} is not known (set logging.peak_tflops)")
