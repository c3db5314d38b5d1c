"""Which device a rank takes: never the CPU by mistake. Machines are made of files."""

from __future__ import annotations

import warnings

import pytest
import torch

from megatron.training.run import _prepare_torch
from megatron.training.world import choose_device
from megatron.worker import devices
from tests.training.settings import settings

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update your GPU driver"


@pytest.fixture
def gpu_without_driver(tmp_path, monkeypatch):
    """The device files of an NVIDIA GPU, whose driver torch does not take."""
    for name in ("nvidiactl", "nvidia0"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "DEV", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def fail():
        raise RuntimeError(OLD_DRIVER)

    monkeypatch.setattr(torch.cuda, "init", fail)


def config(device: str):
    return settings(1, launch={"device": device})


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_driver_that_is_too_old_stops_the_run_with_what_torch_says(gpu_without_driver, device):
    with pytest.raises(RuntimeError) as error:
        choose_device(config(device), 0)
    assert " ".join(OLD_DRIVER.split()) in str(error.value) and "launch.device=cpu" in str(error.value)


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_the_cpu_is_taken_where_it_is_meant(gpu_without_driver, monkeypatch, hidden):
    assert choose_device(config("cpu"), 0).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert choose_device(config("auto"), 0).type == "cpu"


def test_a_gpu_that_torch_was_not_built_for_is_reported_once(gpu_without_driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.warns(UserWarning, match="has a GPU, but torch .* is built without it: training on the CPU"):
        assert choose_device(config("auto"), 0).type == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_device(config("auto"), 1).type == "cpu"
    with pytest.raises(RuntimeError, match="launch.device: cuda, but torch sees no GPU here"):
        choose_device(config("cuda"), 0)


def test_deterministic_runs_do_not_fill_new_tensors(monkeypatch):
    """torch would fill each new tensor with NaN: a kernel more for each, on a GPU."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    fill = torch.utils.deterministic.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    try:
        _prepare_torch(settings(1, training={"deterministic": True}))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_float32_matmul_precision(precision)
