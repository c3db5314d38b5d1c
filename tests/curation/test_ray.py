"""A recipe on Ray: a cluster of this machine, two tasks at a time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

pytest.importorskip("datatrove")

from megatron.config.problems import ConfigError  # noqa: E402
from megatron.curation import run as module  # noqa: E402
from megatron.curation.tasks import ShardTask  # noqa: E402
from megatron.data.errors import DataError  # noqa: E402
from tests.curation.recipes import curate, recipe, tree  # noqa: E402
from tests.curation.test_runs import sources  # noqa: E402
from tests.paths import ROOT  # noqa: E402

STAGES = [{"keep": {"signals": {"rps_doc_word_count": [3, 1000]}}}, {"pii": {}}, {"exact": {}}]


def test_ray_gives_the_bytes_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed, the executor of this test")
    made = sources(tmp_path)
    curate(tmp_path, STAGES, made)
    os.rename(tmp_path / "out", tmp_path / "local")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # of a cluster that only this process reaches
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        curate(tmp_path, STAGES, made, executor="ray", workers=2)
    finally:
        ray.shutdown()
    assert tree(tmp_path / "out") == tree(tmp_path / "local")


def test_a_recipe_on_ray_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="executor: ray must have the package ray"):
        recipe(tmp_path, STAGES, sources(tmp_path), executor="ray")


def test_a_task_that_fails_on_ray_ends_the_run_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's executor logs the errors of tasks and returns."""

    class Silent(module.LocalExecutor):
        def run(self) -> None:
            for rank in self.get_incomplete_ranks():
                with contextlib.suppress(OSError):
                    self._run_for_rank(rank)

    def fail(task: ShardTask, data: object, rank: int = 0, world_size: int = 1) -> object:
        if rank == 1:
            raise OSError("the store does not answer")
        return original(task, data, rank, world_size)

    made, original = sources(tmp_path), ShardTask.run
    curate(tmp_path, STAGES, made)
    os.rename(tmp_path / "out", tmp_path / "local")
    monkeypatch.setattr(module, "LocalExecutor", Silent)
    monkeypatch.setattr(ShardTask, "run", fail)
    with pytest.raises(DataError, match=r"1 of the 2 tasks of the step shard failed \(the first: 1\)"):
        curate(tmp_path, STAGES, made)
    assert not (tmp_path / "out" / "report.json").exists()
    monkeypatch.setattr(ShardTask, "run", original)
    curate(tmp_path, STAGES, made)
    assert tree(tmp_path / "out") == tree(tmp_path / "local")
