"""Pages of 2 MiB below large tensors, by the kernel's own account of the process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from megatron.parallel.layout.precision import LARGE, use_large_pages

CHOICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LINUX = sys.platform == "linux" and CHOICE.exists() and "[never]" not in CHOICE.read_text()


def has_advice(address: int) -> bool:
    """Whether the range of memory with this address has the flag of large pages."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (first := line.split()[0]) and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
        elif first == "VmFlags:" and begin <= address < end:
            return "hg" in line.split()
    raise LookupError(address)


@pytest.mark.skipif(not LINUX, reason="the kernel has no large pages")
def test_large_tensors_get_large_pages_and_keep_their_values():
    large, small = torch.arange(LARGE // 2).double(), torch.arange(1000).double()
    middle = large.data_ptr() + 8 * LARGE // 4
    use_large_pages([large[5:9], small, torch.empty(3, device="meta")])  # a part stands for its storage
    assert has_advice(middle) and not has_advice(small.data_ptr())
    assert large.equal(torch.arange(LARGE // 2).double())


def test_other_systems_have_none(monkeypatch):
    monkeypatch.setattr(sys, "platform", "other")
    monkeypatch.setattr("ctypes.CDLL", lambda *_: 1 / 0)
    use_large_pages([torch.zeros(LARGE // 4)])
