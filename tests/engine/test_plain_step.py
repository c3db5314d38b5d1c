"""How much of the package the plainest step runs through, and that it meets no part of a feature that is off."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.paths import ROOT

MOST = 32  # files of the package with a function that one step runs. It was 47 before features were parts
LONGEST = 300  # lines of engine.py
STEP = """
import json, os, sys
import torch
from megatron.config import resolve
from megatron.engine.deepspeed.process import prepare_deepspeed
from megatron.engine.engine import build_engine
from megatron.engine.parts import PARTS
from megatron.data.batch import StepBatch
from megatron.parallel.layout.mesh import Mesh

config = resolve({
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 64, "attention": {"heads": 4}},
    "training": {"steps": 2, "global_batch_size": 2, "micro_batch_size": 2, "sequence_length": 16},
    "data": {"synthetic": "copy"},
}, ranks=1)
os.environ["LOCAL_RANK"] = "0"
prepare_deepspeed(torch.device("cpu"))
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
engine = build_engine(config, Mesh.single(), "cpu")
tokens = torch.arange(34).view(1, 2, 17)
batch = lambda step: StepBatch(step=step, tokens=tokens, sample_ids=torch.arange(2).view(1, 2), hash=0)
engine.step(batch(0), 0.1)
files = set()
sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None)
engine.step(batch(1), 0.1)
sys.setprofile(None)
parts = [entry.path.partition(":")[0] for entry in PARTS]
print(json.dumps({
    "files": sorted(name for name in files if f"{os.sep}megatron{os.sep}" in name),
    "parts": sorted(engine.parts),
    "imported": [each for each in parts if each in sys.modules],
}))
"""


def test_a_plain_step_meets_no_feature(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STEP, str(tmp_path / "store")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parts"] == [] and found["imported"] == []
    assert len(found["files"]) <= MOST, "\n".join(found["files"])


def test_the_engine_can_be_read():
    assert len((ROOT / "megatron/engine/engine.py").read_text().splitlines()) < LONGEST
