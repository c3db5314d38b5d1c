"""Programs of plain DeepSpeed, without universal checkpoints: their files become checkpoints that a run continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.hf.importer import logical_tensors
from megatron.config import load
from tests.checkpoint.exchange_with_deepspeed import TINY, tool, values_of
from tests.workers import run as on_ranks


def plain_program(folder: str, config_file: str, stage: int) -> tuple[dict[str, str], dict]:
    """A hand-written loop over `deepspeed.initialize`, as users have it: no word of universal checkpoints, a
    buffer, and in its optimizer one group of all parameters.

    Returns:
        Our names and the program's, and the values of each parameter and its states, gathered by DeepSpeed.
    """
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from megatron.config import load
    from megatron.engine.deepspeed.process import prepare_deepspeed
    from megatron.model.stack import build_model

    class Program(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = build_model(load([config_file], ["zero.stage=0"], ranks=1).config)
            self.register_buffer("table", torch.arange(7.0))

        def forward(self, tokens, labels, weights):
            return self.net(tokens, labels, weights)[0]

    prepare_deepspeed(torch.device("cpu"))
    model = Program()
    logical = {parameter.logical.name: name for name, parameter in model.named_parameters()}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(64, (2, 17), generator=draw)
        loss = engine(tokens[:, :-1], tokens[:, 1:], torch.full((2, 16), 1 / 32))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, tag="plain")
    found = {}
    for name, parameter in engine.module.named_parameters():
        if stage == 0:
            moments = optimizer.state[parameter]
            states = [parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]]
        else:
            states = [safe_get_full_fp32_param(parameter)]
            states += [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
        for state, values in zip(("master", "exp_avg", "exp_avg_sq"), states, strict=True):
            found[name, state] = values.float().numpy().copy()
    dist.barrier()
    return logical, found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_program_of_deepspeed_continues_here(tmp_path: Path, stage: int, capsys) -> None:
    """Weights and both moments equal the values that DeepSpeed itself gathers, and the updates are counted."""
    (tmp_path / "tiny.yml").write_text(TINY)
    names, wanted = on_ranks(2, plain_program, str(tmp_path), str(tmp_path / "tiny.yml"), stage)[0]
    (tmp_path / "names.yml").write_text(json.dumps(names))
    words = [str(tmp_path / "plain"), str(tmp_path / "ours"), "--config", str(tmp_path / "tiny.yml")]
    words += ["--names", str(tmp_path / "names.yml"), "--trust"]
    assert tool("from_deepspeed").main(words) == 0, capsys.readouterr().err
    ours = values_of(tmp_path / "ours")
    assert {(names[name], state) for name, state in ours} == set(wanted)
    for (name, state), values in ours.items():
        assert values.flatten().equal(torch.from_numpy(wanted[names[name], state]).flatten()), (name, state)
    meta = open_checkpoint(tmp_path / "ours").meta
    assert (meta.step, meta.optimizer, meta.resumable) == (3, {"step": 3.0}, True)


def test_without_zero_moments_have_no_names_and_are_never_guessed(tmp_path: Path, capsys) -> None:
    """Two groups of an optimizer, as Accelerate and Trainer make them: their order is not the module's. The weights are
    taken, and no run can resume from them. A tied weight counts once."""
    (tmp_path / "tiny.yml").write_text(TINY)
    shapes = {name: tensor.shape for name, tensor in logical_tensors(load([tmp_path / "tiny.yml"], ranks=1)).items()}
    module = {name: torch.randn(shape) for name, shape in shapes.items()}
    numbers = list(range(len(module)))
    state = {
        number: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}
        for number, shape in enumerate(shapes.values())
    }
    for case, groups in (("one", [numbers]), ("two", [numbers[::2], numbers[1::2]]), ("fewer", [numbers[:-1]])):
        (tmp_path / case).mkdir()
        content = {
            "module": {**module, "tied.copy": module["head.weight"]},
            "optimizer": {"state": state, "param_groups": [{"params": each} for each in groups]},
            "buffer_names": [],
            "global_steps": 4,
            "skipped_steps": 1,
        }
        torch.save(content, tmp_path / case / "mp_rank_00_model_states.pt")
        words = [str(tmp_path / case), str(tmp_path / f"{case}-ours"), "--config", str(tmp_path / "tiny.yml")]
        assert tool("from_deepspeed").main(words) == 0, capsys.readouterr().err
        ours, meta = values_of(tmp_path / f"{case}-ours"), open_checkpoint(tmp_path / f"{case}-ours").meta
        assert all(ours[name, "master"].equal(values) for name, values in module.items())
        assert meta.resumable == (case == "one") and meta.step == 3
        assert len(ours) == len(module) * (3 if case == "one" else 1)
    state[0]["../../../outside"] = torch.zeros(shapes["embedding.tokens.weight"])
    (tmp_path / "hostile").mkdir()
    content["optimizer"] = {"state": state, "param_groups": [{"params": numbers}]}
    torch.save(content, tmp_path / "hostile" / "mp_rank_00_model_states.pt")
    assert tool("from_deepspeed").main([str(tmp_path / "hostile"), str(tmp_path / "no"), *words[2:]]) == 2
    assert "outside" in capsys.readouterr().err and not list(tmp_path.rglob("outside*"))
