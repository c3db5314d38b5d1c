"""A recipe on Slurm: the scripts that are submitted, run in their order by a stand-in for sbatch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("datatrove")

from tests.curation.recipes import curate, tree  # noqa: E402
from tests.curation.test_runs import STAGES, sources  # noqa: E402

# Runs each task of the array at once, and only after a job that the dependency names.
SBATCH = """#!{python}
import os, pathlib, re, subprocess, sys
jobs = pathlib.Path({jobs!r})
script = pathlib.Path(sys.argv[-1]).read_text()
for each in re.findall(r"afterok:(\\d+)", " ".join(sys.argv)):
    assert (jobs / each).exists(), f"job {{each}} has not run"
number = len(list(jobs.iterdir())) + 1
array = re.search(r"#SBATCH --array=0-(\\d+)", script)
for task in range(int(array[1]) + 1 if array else 1):
    # The job that merges datatrove's own statistics is not part of the result.
    if "merge_stats" not in script:
        own = {{**os.environ, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_NODELIST": "here", "RUN_OFFSET": "0"}}
        subprocess.run(["bash", "-c", script], env=own, check=True, stdout=sys.stderr)
(jobs / str(number)).write_text(script)
print("Submitted batch job", number)
"""


@pytest.mark.tour
def test_slurm_gives_the_bytes_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sources(tmp_path)
    curate(tmp_path, STAGES, made, shard_bytes=1)
    os.rename(tmp_path / "out", tmp_path / "local")
    programs, jobs = tmp_path / "bin", tmp_path / "jobs"
    programs.mkdir(), jobs.mkdir()
    launch = f"#!{sys.executable}\nfrom datatrove.tools.launch_pickled_pipeline import main\nmain()\n"
    named = {
        "sbatch": SBATCH.format(python=sys.executable, jobs=str(jobs)),
        "srun": '#!/bin/bash\nwhile [[ $1 == -* || $1 == 1 ]]; do shift; done\nexec "$@"\n',
        "scontrol": "#!/bin/bash\necho here\n",
        "launch_pickled_pipeline": launch,
    }
    for name, text in named.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    slurm = {"partition": "cpu", "time": "01:00:00"}
    report = curate(tmp_path, STAGES, made, shard_bytes=1, executor="slurm", slurm=slurm, workers=2)
    assert report["started"] == [
        "shard (4 tasks)",
        "duplicates (1 tasks)",
        "shard (4 tasks)",
        "duplicates (1 tasks)",
        "shard (4 tasks)",
        "page (1 tasks)",
    ]
    assert tree(tmp_path / "out") == tree(tmp_path / "local")
    script = (jobs / "1").read_text()
    assert "#SBATCH --partition=cpu" in script and "#SBATCH --array=0-3%2" in script
