"""Hostfiles, selections of hosts, Slurm's node lists, networks, and which runner is chosen."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.sections.layout import LaunchSection
from megatron.launch.job.hosts import HostError, choose_runner, read_hostfile, select
from megatron.launch.wire.specification import Host
from megatron.worker.devices import cores_of, parse_cores, ranks_here
from megatron.worker.network import Address, addresses, free_port, shared_network
from megatron.worker.place import expand_nodes


def hostfile(tmp_path, text):
    path = tmp_path / "hostfile"
    path.write_text(text)
    return path


def test_a_hostfile(tmp_path):
    path = hostfile(tmp_path, "# two hosts\n\na.example.org slots=2\n  10.0.0.7\tslots=8  # big\nfe80::1 slots=1\n")
    assert read_hostfile(path) == [
        Host("a.example.org", (0, 1)),
        Host("10.0.0.7", tuple(range(8))),
        Host("fe80::1", (0,)),
    ]


def test_all_mistakes_of_a_hostfile_at_once(tmp_path):
    path = hostfile(
        tmp_path,
        "a slots=2\nb\na slots=1\nc slots=0\nd slots=two\n-oProxyCommand=x slots=1\ne slots=1 max=2\n$(id) slots=1\n",
    )
    with pytest.raises(HostError) as caught:
        read_hostfile(path)
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == ["2", "3", "4", "5", "6", "7", "8"]


def test_missing_and_empty_hostfiles_are_errors(tmp_path):
    with pytest.raises(HostError, match="No such file"):
        read_hostfile(tmp_path / "nowhere")
    with pytest.raises(HostError, match="no host"):
        read_hostfile(hostfile(tmp_path, "# nothing\n"))


HOSTS = [Host("a", (0, 1, 2, 3)), Host("b", (0, 1)), Host("c-1.x", (0,))]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, {"a": (0, 1, 2, 3), "b": (0, 1), "c-1.x": (0,)}),
        ("b", None, {"b": (0, 1)}),
        ("b@a:3,1", None, {"a": (1, 3), "b": (0, 1)}),
        ("a:0@a:2", None, {"a": (0, 2)}),
        (None, "b", {"a": (0, 1, 2, 3), "c-1.x": (0,)}),
        (None, "a:0,1@c-1.x", {"a": (2, 3), "b": (0, 1)}),
    ],
)
def test_include_and_exclude(include, exclude, expected):
    assert {host.name: host.slots for host in select(HOSTS, include, exclude)} == expected


@pytest.mark.parametrize(
    ("include", "exclude", "part"),
    [
        ("a", "b", "together"),
        ("d", None, "no host 'd'"),
        ("b:2", None, "no slot 2"),
        ("b:x", None, "name:0,2"),
        (None, "a@b@c-1.x", "leaves no host"),
    ],
)
def test_wrong_selections(include, exclude, part):
    with pytest.raises(HostError, match=part):
        select(HOSTS, include, exclude)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11,20],login", ["n08", "n09", "n10", "n11", "n20", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1,3]-ib,b[001]x", ["a1-ib", "a3-ib", "b001x"]),
    ],
)
def test_node_lists(text, names):
    assert expand_nodes(text) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n[1--2]"])
def test_what_is_no_node_list(text):
    with pytest.raises(ValueError, match="not a list of nodes"):
        expand_nodes(text)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=30))
def test_node_lists_of_numbers_come_back(numbers):
    assert expand_nodes("n[" + ",".join(f"{number:04d}" for number in numbers) + "]") == [
        f"n{number:04d}" for number in numbers
    ]


def here(*pairs):
    return [Address(interface, address, prefix) for interface, address, prefix in pairs]


def test_the_network_that_all_share():
    hosts = [
        here(
            ("lo", "127.0.0.1", 8), ("docker0", "172.17.0.1", 16), ("eth0", "192.168.1.4", 24), ("ib0", "10.1.0.4", 16)
        ),
        here(("lo", "127.0.0.1", 8), ("docker0", "172.17.0.1", 16), ("ens3", "10.1.7.5", 16)),
        here(("bond0", "10.1.9.9", 16), ("lo", "127.0.0.1", 8)),
    ]
    assert [each.interface for each in shared_network(hosts)] == ["ib0", "ens3", "bond0"]


def test_the_network_of_the_preferred_address_comes_first():
    hosts = [
        here(("eth0", "192.168.1.4", 24), ("ib0", "10.1.0.4", 16)),
        here(("eth0", "192.168.1.5", 24), ("ib0", "10.1.0.5", 16)),
    ]
    assert shared_network(hosts)[0].address == "192.168.1.4"
    assert shared_network(hosts, preferred="10.1.0.4")[0].address == "10.1.0.4"
    assert [each.address for each in shared_network(hosts, interface="ib0")] == ["10.1.0.4", "10.1.0.5"]


def test_no_network_in_common():
    assert shared_network([here(("eth0", "10.0.0.1", 24)), here(("eth0", "10.0.1.1", 24))]) is None
    assert shared_network([here(("br0", "10.9.0.1", 24)), here(("br0", "10.9.0.1", 24))]) is None, (
        "the same address is no shared network"
    )
    assert shared_network([here(("eth0", "10.0.0.1", 24)), here(("ib0", "10.0.0.2", 24))], interface="eth0") is None


def test_own_addresses_and_a_free_port():
    assert "127.0.0.1" in {each.address for each in addresses()}
    assert 1024 < free_port("127.0.0.1") < 65536


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8,10-11", [0, 1, 2, 3, 8, 10, 11]), ("5", [5]), ("", []), ("\n", [])]
)
def test_core_lists(text, cores):
    assert parse_cores(text) == cores


def test_equal_shares_of_cores_do_not_overlap():
    import os

    allowed = os.sched_getaffinity(0)
    shares = [cores_of(rank, 2, {}, "cores") for rank in range(2)]
    if len(allowed) >= 2:
        assert not set(shares[0]) & set(shares[1]) and set(shares[0] + shares[1]) <= allowed
    assert cores_of(0, 10**6, {}, "cores") is None and cores_of(0, 2, {}, "none") is None


def test_one_rank_without_accelerators():
    assert ranks_here({}, "cpu") == 1


@pytest.fixture
def all_programs(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}


def test_auto_chooses_by_where_it_is(tmp_path, all_programs):
    path = str(hostfile(tmp_path, "a slots=2\nb slots=2\n"))
    assert choose_runner(LaunchSection(ranks=3), {}).runner == "local"
    chosen = choose_runner(LaunchSection(), SLURM)
    assert (chosen.runner, chosen.ranks, [host.name for host in chosen.hosts]) == ("slurm", 8, ["n1", "n2"])
    assert choose_runner(LaunchSection(ranks=2), SLURM).ranks == 4
    assert choose_runner(LaunchSection(hostfile=path), SLURM).runner == "ssh", "what is said wins over where we are"
    chosen = choose_runner(LaunchSection(runner="torchrun", hostfile=path), {})
    assert (chosen.runner, chosen.transport) == ("torchrun", "ssh")
    assert choose_runner(LaunchSection(runner="torchrun", ranks=2), {}).transport == "local"
    assert choose_runner(LaunchSection(hostfile=path, ranks=1, exclude="a"), {}).hosts == (Host("b", (0,)),)


@pytest.mark.parametrize(
    ("section", "environment", "part"),
    [
        ({"runner": "ssh"}, {}, "needs launch.hostfile"),
        ({"runner": "slurm"}, {}, "inside an allocation"),
        ({}, {"RANK": "0", "WORLD_SIZE": "2"}, "started ranks already"),
        ({"hostfile": "/nowhere"}, {}, "No such file"),
    ],
)
def test_what_does_not_fit(section, environment, part, all_programs):
    with pytest.raises(HostError, match=part):
        choose_runner(LaunchSection(**section), environment)


def test_hostfile_and_local_contradict(tmp_path, all_programs):
    path = str(hostfile(tmp_path, "a slots=2\n"))
    with pytest.raises(HostError, match="local"):
        choose_runner(LaunchSection(runner="local", hostfile=path), {})
    with pytest.raises(HostError, match="2 slots"):
        choose_runner(LaunchSection(hostfile=path, ranks=4), {})


def test_a_runner_whose_program_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(HostError, match="not installed"):
        choose_runner(LaunchSection(runner="pdsh", hostfile=str(hostfile(tmp_path, "a slots=1\n"))), {})


@pytest.mark.parametrize("slots", ["4097", "99999999999", "9" * 5000])
def test_a_huge_number_of_slots_is_refused_with_its_line(tmp_path, slots):
    (tmp_path / "hosts").write_text(f"a slots=4096\nb slots={slots}\n")
    with pytest.raises(HostError, match=r"hosts:2: b has \d+ slots, and must have at most 4096"):
        read_hostfile(tmp_path / "hosts")


@pytest.mark.parametrize(
    "text", ["a[1-999999999]", "a[1-99999]b[1-99999]", f"a[1-{'9' * 5000}]", "a[1-9],b[0-1000000]"]
)
def test_a_huge_list_of_nodes_is_refused(text):
    with pytest.raises(ValueError, match="hosts, and a list of nodes must have at most 1,000,000"):
        expand_nodes(text)
