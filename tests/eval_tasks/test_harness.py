"""The same answers as the harness gives by itself, with its Hugging Face backend on the exported model."""

from __future__ import annotations

import shutil
import sysconfig
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.checkpoint import SOLO, GroupCommunicator, open_checkpoint
from megatron.config import resolve
from megatron.data.tokenizer import build_tokenizer
from megatron.engine.deepspeed.process import prepare_deepspeed
from megatron.engine.engine import build_engine
from megatron.evaluation.harness import run_tasks, undisturbed
from megatron.evaluation.scoring import Scorer
from megatron.evaluation.select import Request, manager
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.training.start.resume import initialize
from megatron.training.world import World
from tests.eval_tasks.models import KINDS, LENGTH, settings, write_checkpoint
from tests.selection import toured
from tests.workers import run

REQUESTS = (  # a few documents of each kind of request. Contexts longer and shorter than the model
    Request("deepy_arithmetic", 2, 3),
    Request("deepy_induction", None, 3),
    Request("deepy_cloze", None, 4),
    Request("deepy_source", None, 2),
    Request("deepy_copy", None, 3),
)
PARTS = ("asyncio", "email", "http", "importlib", "xml")  # of the standard library, some texts in each
LAYOUTS = {
    "one": (1, {}),
    "dp2, ZeRO 1": (2, {"zero": {"stage": 1}}),
    "dp2, exact": (2, {"zero": {"stage": 1}, "evaluation": {"exact": True, "truncate": True}}),
    "dp2, ZeRO 3": (2, {"zero": {"stage": 3}}),
    "tp2, sequence parallel": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "tp2 · pp2": (4, {"parallel": {"tensor": 2, "pipeline": 2}, "zero": {"stage": 0}}),
    "dp2 · ep2": (2, {"parallel": {"expert": 2}, "zero": {"stage": 0}}),
}
# Layouts differ in who answers and kinds in what they keep between tokens: not every kind needs every layout.
OFTEN = {
    **{kind: ("tp2 · pp2",) for kind in KINDS},
    "gpt_neox": ("one", "dp2, exact", "tp2, sequence parallel"),
    "mixtral": ("dp2 · ep2",),
}
PAIRS = [
    pytest.param(kind, layout, marks=[] if layout in OFTEN[kind] else [pytest.mark.slow])
    for kind in KINDS
    for layout in LAYOUTS
    if (layout != "dp2 · ep2" or kind == "mixtral") and (kind, layout) != ("rwkv7", "one")
]


def answers(results: dict) -> dict[str, list]:
    """Answers to the requests, in order: the harness's own records of samples."""
    return {task: [sample["resps"] for sample in samples] for task, samples in results["samples"].items()}


@contextmanager
def library_of(folder: Path):
    """The tasks that are made from the standard library are made from those parts of it that a folder has."""
    whole = sysconfig.get_path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(folder / "library") if name == "stdlib" else whole(name))
        yield


def on_layout(kind: str, folder, ranks: int, layout: dict):
    """The harness through our adapter, on every rank of a layout. Results on rank 0."""
    import torch

    device = torch.device("cpu")
    config = resolve({**settings(kind, folder), **layout}, ranks=ranks)
    prepare_deepspeed(device)
    mesh = Mesh.build(Layout.of(config, ranks))
    engine = build_engine(config, mesh, device, values=False)
    communicator = SOLO if ranks == 1 else GroupCommunicator()
    world = World(device, mesh, communicator, communicator)
    initialize(open_checkpoint(folder / "checkpoints" / "step_00000007"), world, engine)
    tokenizer = build_tokenizer(config.tokenizer)
    scorer = Scorer.of_tasks(config, engine, mesh, device, 4)
    with library_of(folder):
        return run_tasks(REQUESTS, scorer, communicator, tokenizer, samples=True)


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory):
    """The folder of a kind's checkpoint, and the results of the harness's own backend on its export."""
    known: dict = {}

    def of(kind: str):
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            path = write_checkpoint(kind, folder)
            for part in PARTS:
                shutil.copytree(Path(sysconfig.get_path("stdlib"), part), folder / "library" / part)
            known[kind] = folder, _reference(kind, folder, path)
        return known[kind]

    return of


def _reference(kind: str, folder, path):
    if kind == "rwkv7":  # no other program: one process
        return run(1, on_layout, kind, folder, *LAYOUTS["one"])[0]
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from megatron.checkpoint.hf.export import export

    export(open_checkpoint(path), folder / "hf")
    # One text at a time: on the left of a batch, recurrent models of transformers would read the padding.
    backend = HFLM(str(folder / "hf"), device="cpu", dtype="float32", batch_size=1, max_length=LENGTH)
    whole: dict = {"samples": {}, "results": {}}
    for request in REQUESTS:
        with undisturbed(), library_of(folder):
            found = simple_evaluate(
                backend,
                tasks=[request.name],
                num_fewshot=request.few_shot,
                limit=request.limit,
                bootstrap_iters=10,
                task_manager=manager((), False),
            )
        whole["samples"] |= found["samples"]
        whole["results"] |= found["results"]
    return whole


@pytest.mark.parametrize(("kind", "layout"), toured(PAIRS), ids=lambda word: word.replace(" ", "-"))
def test_answers_are_those_of_the_harness_on_the_exported_model(kind, layout, by_transformers):
    folder, expected = by_transformers(kind)
    found = run(LAYOUTS[layout][0], on_layout, kind, folder, *LAYOUTS[layout])
    assert all(each is None for each in found[1:])
    ours, theirs = answers(found[0]), answers(expected)
    assert set(ours) == {request.name for request in REQUESTS}
    for task in ours:
        assert len(ours[task]) == len(theirs[task]) > 1
        for mine, other in zip(ours[task], theirs[task]):
            if task == "deepy_copy":
                assert mine == other
                continue
            for ((likelihood, *greedy),), ((wanted, *likeliest),) in zip(_pairs(mine), _pairs(other)):
                assert likelihood == pytest.approx(wanted, abs=1e-4, rel=1e-6)
                assert greedy == likeliest
    for task, metrics in expected["results"].items():
        for metric in ("acc,none", "acc_norm,none", "bits_per_byte,none", "perplexity,none", "exact_match,none"):
            if metric in metrics:
                assert found[0]["results"][task][metric] == pytest.approx(metrics[metric], rel=1e-4)


def _pairs(response):
    """[(log-likelihood, greedy)] of each request of a document. A rolling one has no second part."""
    return [[answer if isinstance(answer, (tuple, list)) else (answer,)] for (answer,) in response]
