"""Commands of the runner, and its refusals."""

import sys

import pytest
from my_lab.nice import RUNNER

from megatron.config.registry import registry_of
from megatron.config.sections.layout import LaunchSection
from megatron.launch.job.hosts import HostError, choose_runner
from megatron.launch.wire.specification import Host, Specification


def test_its_command():
    job = Specification((Host("here", (0, 1)),), ("python", "train.py"), "/")
    (command,) = RUNNER.commands(job, LaunchSection())
    assert command.arguments[:5] == ("nice", "-n", "19", sys.executable, "-u") and command.hosts == (0,)


@pytest.mark.parametrize("name", ["nice", "my_lab.nice:RUNNER"])
def test_chosen_by_name_or_import_path(name, tmp_path):
    registry = registry_of(("my_lab",))
    choice = choose_runner(LaunchSection(runner=name, ranks=3), {}, registry)
    assert choice.runner == name and choice.ranks == 3 and choice.starter is RUNNER
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\n")
    with pytest.raises(HostError, match="remove one of them"):
        choose_runner(LaunchSection(runner=name, hostfile=str(hosts)), {}, registry)
