"""Mistakes in the section `peers` are found before a process starts, and shares of batches are disjoint."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.config import ConfigError, resolve
from megatron.config.resolution import combine
from megatron.config.source.layers import ConfigSource
from megatron.config.source.yaml_source import read_override
from megatron.data.loader import build_loader
from megatron.features.peers.hook import identity_of
from tests.features.peers.companies import VALUES, secret

BAD = {
    "no folder": ({"folder": None}, "peers.folder", "must be given"),
    "one name twice": ({"members": ["a", "a"]}, "peers.members", "two peers with one name would read one share"),
    "a path as a name": ({"members": ["a", "../b"]}, "peers.members", "must be different names"),
    "a name that is no member": ({"name": "z"}, "peers.name", "must be one of peers.members"),
    "an impossible quorum": ({"quorum": 3}, "peers.quorum", "must be at most 2"),
    "no patience": ({"patience": 1.0}, "peers.timeout", "must be at most peers.patience"),
    "no key": ({"key_file": None}, "peers.key_file", "must be given"),
    "a missing key": ({"key_file": "gone"}, "peers.key_file", "must be a file that can be read"),
    "fragments of diloco": ({"fragments": 2}, "peers.algorithm", "must be streaming_diloco"),
    "a long delay": ({"algorithm": "streaming_diloco", "delay": 2}, "peers.every", "peers.delay less than"),
    "steps after the last round": ({"every": 3}, "training.steps", "must be a multiple of 3"),
    "no public keys": ({"signature": "ed25519"}, "peers.public_keys", "must have one key of 64 hexadecimal digits"),
    "gradients of every second step": ({"algorithm": "gradients"}, "peers.every", "must be 1"),
    "slots of weights": ({"slots": 4}, "peers.slots", "must go with peers.algorithm: gradients"),
    "the top of dense differences": ({"top": 32}, "peers.top", "must not be given with diloco"),
    "an outer step of gradients": (
        {"algorithm": "gradients", "every": 1, "outer_lr": 0.5}, "peers.outer_lr", "must not be given with gradients",
    ),
    "a server without a port": ({"folder": "tcp://host"}, "peers.folder", "must be tcp://host:port"),
    "an address without a port": ({"listen": "host"}, "peers.listen", "must be HOST:PORT"),
    "a port that is none": ({"listen": "host:65536"}, "peers.listen", "a port from 1 to 65535"),
    "any free port": ({"listen": "host:0"}, "peers.listen", "a port from 1 to 65535"),
    "all addresses": ({"listen": "0.0.0.0:7000"}, "peers.listen", "must be one address"),
    "a port of a server that is none": ({"folder": "tcp://host:0"}, "peers.folder", "must be tcp://host:port"),
    "the name of a server": ({"members": ["a", "server"]}, "peers.members", "must not have the name server"),
    "no key of the server": (
        {"signature": "ed25519", "folder": "tcp://h:1", "public_keys": {"a": "ab" * 32, "b": "cd" * 32}},
        "peers.public_keys", "deepy peers serve",
    ),
    "a scorer that is no path": ({"scorer": "mine"}, "peers.scorer", "must be an import path"),
    "a scorer of gradients": (
        {"algorithm": "gradients", "every": 1, "scorer": "a.b:c"}, "peers.scorer", "must not be given with gradients",
    ),
    "a delay without fragments' algorithms": ({"algorithm": "sparseloco", "delay": 1}, "peers.delay", "or decoupled"),
    "equal public keys": (
        {"signature": "ed25519", "public_keys": dict.fromkeys("ab", "ab" * 32)}, "peers.public_keys", "must differ",
    ),
}  # fmt: skip


def values(tmp_path, **keys) -> dict:
    own = {
        "every": 2, "name": "a", "members": ["a", "b"], "folder": str(tmp_path), "signature": "shared_key",
        "key_file": secret(tmp_path), **keys,
    }  # fmt: skip
    return {**VALUES, "run": {"dir": str(tmp_path / "run")}, "peers": own}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(tmp_path, name):
    keys, key, rule = BAD[name]
    with pytest.raises(ConfigError) as caught:
        resolve(values(tmp_path, **keys), ranks=1)
    assert key in str(caught.value) and rule in str(caught.value) and "fix:" in str(caught.value)


@pytest.mark.parametrize(
    "text, mode, rule",
    [
        ("00" * 32, 0o600, "must be a random key"),
        (bytes(range(32)).hex(), 0o600, "must be a random key"),
        ("secret", 0o600, "must be a file of 64 hexadecimal digits"),
        (None, 0o644, "readable by its owner only"),
    ],
)
def test_keys_that_are_known_to_all(tmp_path, text, mode, rule):
    given = values(tmp_path)
    file = tmp_path / "key"
    file.write_text(text or file.read_text())
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rule):
        resolve(given, ranks=1)


def test_values_that_all_peers_must_share(tmp_path):
    """Model, tokenizer, seed, batch, H, data and version. Names, layouts and timeouts are a peer's own."""

    def identity(*words: str) -> dict:
        sources = [ConfigSource(values(tmp_path)), *map(read_override, ("model.vocab_size=384", *words))]
        return identity_of(combine(sources, ranks=1).config, "samples")

    plain = identity()
    shared = {
        "model.hidden_size": "32", "tokenizer.type": "bytes", "training.seed": "7", "training.global_batch_size": "4",
        "training.steps": "10", "optimizer.lr": "0.5", "peers.every": "4", "peers.algorithm": "sparseloco",
    }  # fmt: skip
    for key, value in shared.items():
        other = identity(f"{key}={value}")
        assert plain[key] != other[key], key
    assert identity("peers.name=b", "peers.timeout=7", "run.dir=x", "training.micro_batch_size=2") == plain
    assert {"samples", "version"} <= plain.keys()


def test_a_section_without_rounds_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match="must go with peers.every"):
        resolve({**VALUES, "peers": {"name": "a"}}, ranks=1)


def test_outer_steps_follow_from_the_algorithm(tmp_path):
    dense, sparse = (resolve(values(tmp_path, algorithm=each), ranks=1).peers for each in ("diloco", "sparseloco"))
    assert (dense.outer_lr, dense.outer_momentum) == (0.7, 0.9)
    assert (sparse.outer_lr, sparse.outer_momentum) == (1.0, 0.0)


def test_shares_are_the_global_batch(tmp_path):
    """Peers with different numbers of data parallel ranks read each sample of the stream's next batch once."""
    for step in (0, 5):
        found = []
        for name, ranks in (("a", 1), ("b", 2)):
            config = resolve(values(tmp_path, name=name), ranks=ranks)
            for rank in range(ranks):
                loader = build_loader(config, data_rank=rank, data_ranks=ranks)
                found += np.asarray(loader.read(step).sample_ids).flatten().tolist()
                loader.close()
        assert found == list(range(4 * step, 4 * step + 4))
