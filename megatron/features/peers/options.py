"""Keys and rules of peers, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron.config.arithmetic.wire import FEEDS_BACK
from megatron.config.features.feature import Feature, Keys, wanted_features
from megatron.config.optimizer_kind import optimizer_kind
from megatron.config.registry import SCORER
from megatron.config.section import Derivable, Derived, Section, key
from megatron.extras import missing

if TYPE_CHECKING:
    from megatron.config.problems import Problem
    from megatron.config.rule_context import RuleContext

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^/\[\]:@?#\s]+):([0-9]{1,5})/?")
HEX = re.compile(r"[0-9a-f]{64}")
LIBRARIES = ("nacl", "cryptography")  # either signs by Ed25519
TCP, SERVER = "tcp://", "server"  # a folder over sockets, and the name by which its server signs
SPARSE, STREAMING, DECOUPLED, GRADIENTS = "sparseloco", "streaming_diloco", "decoupled", "gradients"


def _by_algorithm(sparse: float, dense: float) -> Derived:
    return Derived(
        f"{sparse:g} with peers.algorithm: sparseloco, else {dense:g}",
        lambda own, at: sparse if own["algorithm"] == SPARSE else dense,
        (".algorithm",),
    )


class PeersSection(Section):
    every: int | None = key(
        None, "Steps between two exchanges of each weight with the other peers.", unit="steps", gt=0
    )
    algorithm: Literal["diloco", "streaming_diloco", "sparseloco", "decoupled", "gradients"] = key(
        "diloco",
        "diloco sends all differences, streaming_diloco some layers at a time, sparseloco the largest in two "
        "bits each. decoupled peers do not wait for each other. With gradients each step is data parallel "
        "(docs/peers.md).",
    )
    slots: int | None = key(
        None, "gradients: number of equal parts of a step's batch. By default one for each member.", gt=0, le=4096
    )
    lost_slots: Literal["compute", "skip"] = key(
        "compute", "gradients: a part whose peer is lost is computed by another peer, or skipped."
    )
    run: str = key("peers", "Name of the common run. Contributions to another run are refused.")
    name: str | None = key(None, "Name of this peer, one of peers.members.")
    members: list[str] = key(
        list, "Names of all peers that may take part. The place of a peer in the list is its share of each batch."
    )
    folder: str | None = key(
        None,
        "Folder that all peers share: a path, an fsspec URL such as s3://bucket/run, or tcp://host:port of "
        "`deepy peers serve`.",
    )
    listen: str | None = key(
        None,
        "HOST:PORT at which the other peers reach this one. Contributions and states then go from peer to peer, and "
        "peers.folder has small files only.",
    )
    signature: Literal["ed25519", "shared_key"] = key(
        "ed25519",
        "ed25519: each peer has a key of its own. shared_key: all peers have one secret key, and trust each other.",
    )
    key_file: str | None = key(None, "File of this peer's secret key: 64 hexadecimal digits (deepy peers key).")
    public_keys: dict[str, str] = key(dict, "ed25519: the public key of each member, 64 hexadecimal digits.")
    quorum: int = key(1, "Least number of contributions to a round.", gt=0)
    timeout: float = key(600.0, "A round waits this long for missing contributions.", unit="seconds", gt=0)
    patience: float = key(
        3600.0, "With fewer contributions than peers.quorum after this time, save and stop.", unit="seconds", gt=0
    )
    outer_lr: Derivable[float] = key(
        None, "Learning rate of the outer step.", derived=_by_algorithm(1.0, 0.7), gt=0, le=10
    )
    outer_momentum: Derivable[float] = key(
        None, "Nesterov momentum of the outer step.", derived=_by_algorithm(0.0, 0.9), ge=0, lt=1
    )
    fragments: int = key(
        1, "streaming_diloco, decoupled: number of fragments. Layer l belongs to fragment l mod n.", gt=0
    )
    delay: int = key(
        0,
        "streaming_diloco: a fragment is applied this long after it was sent. decoupled: with peers.quorum "
        "contributions, a round is open for others until a contributor has trained for this long after its own.",
        unit="steps",
        ge=0,
    )
    alpha: float = key(
        0.0, "streaming_diloco, decoupled: share of the local weights in a fragment that is applied.", ge=0, le=1
    )
    top: int = key(64, "sparseloco: values that are sent of each chunk of 4,096.", ge=1, le=4096)
    decay: float = key(0.95, "sparseloco: factor of what was not sent, in the next round.", ge=0, le=1)
    norm_limit: float = key(
        10.0, "A contribution is refused whose norm is above this multiple of the median norm.", gt=1
    )
    scorer: str | None = key(
        None, "Function of a package that refuses contributions of a round (docs/peers.md).", role=SCORER
    )
    strikes: int = key(3, "A peer is excluded for good after this number of refused contributions.", gt=0)
    state_every: int = key(
        10, "Rounds between two copies of the common weights in the folder, for peers that return.", unit="rounds", gt=0
    )
    replay: str | None = key(
        None, "Folder of an earlier run: repeat its rounds, by its ledger and without its faults, in peers.folder."
    )


class PeersKeys(Section):
    peers: PeersSection = key(PeersSection, "Training with other runs over slow links.")


def is_address(url: str) -> bool:
    """Whether it is tcp://host:port."""
    found = ADDRESS.fullmatch(url)
    return found is not None and 0 < int(found[2]) < 1 << 16


TOP = Keys("", PeersKeys, after="align")


def peers_of(config: Any) -> PeersSection:
    """The section of a `Config`."""
    return TOP.of(config).peers


def joins(config: Any) -> bool:
    """Whether a run takes part itself. With `launch.peers` it is the command that starts the peers."""
    return peers_of(config).every is not None and config.launch.peers is None


def slots_of(own: PeersSection) -> int:
    """Equal parts of a step's batch of all peers."""
    return own.slots or len(own.members) if own.algorithm == GRADIENTS else len(own.members)


def interval(own: PeersSection) -> int:
    """Steps of a round: a fragment of the weights is exchanged in each."""
    assert own.every is not None
    return own.every // own.fragments


def names_are_of_members(context: RuleContext) -> Iterator[Problem]:
    own = peers_of(context.config)
    if not joins(context.config):
        rule, fix = "must go with peers.every", "add peers.every=30, or remove the section"
        if context.config.launch.peers is not None:
            rule = "must not be given with launch.peers, which makes the names, the key and the folder of all peers"
            fix = "remove it"
            yield from _peers_of_one_command(context)
        for name in ("name", "folder", "listen", "members", "key_file", "public_keys"):
            if getattr(own, name):
                yield context.problem(f"peers.{name}", rule=rule, fix=fix)
        return
    if own.folder is None:
        fix = "give a folder that all peers can read and write"
        yield context.problem("peers.folder", rule="must be given: peers meet there", fix=fix)
    elif own.folder.startswith(TCP) and not is_address(own.folder):
        yield context.problem("peers.folder", rule="must be tcp://host:port", fix="add the port of deepy peers serve")
    if own.listen is not None and (own.listen.endswith("/") or not is_address(f"{TCP}{own.listen}")):
        yield context.problem(
            "peers.listen", rule="must be HOST:PORT, with a port from 1 to 65535", fix="give an address of this machine"
        )
    elif own.listen is not None and own.listen.startswith(("0.0.0.0:", "[::]:")):
        fix = "give the address or name of this machine in their network"
        yield context.problem("peers.listen", rule="must be one address: the other peers connect to it", fix=fix)
    if SERVER in own.members:
        yield context.problem(
            "peers.members", rule=f"must not have the name {SERVER}, by which a server signs", fix="use another name"
        )
    bad = [each for each in (*own.members, own.run) if not NAME.fullmatch(each)]
    if bad or len(set(own.members)) < len(own.members) or not own.members:
        yield context.problem(
            "peers.members peers.run",
            rule="must be different names of letters, digits, - and _: two peers with one name would read one share of "
            "the data",
            fix="list each peer once",
        )
    if own.name not in own.members:
        fix = f"use one of {', '.join(own.members)}" if own.members else "add it to peers.members"
        yield context.problem("peers.name", "peers.members", rule="must be one of peers.members", fix=fix)
    if own.quorum > len(own.members):
        yield context.problem(
            "peers.quorum peers.members",
            rule=f"must be at most {len(own.members)}, the number of members: no round would have that many",
            fix="lower it, or add members",
        )
    if own.timeout > own.patience:
        yield context.problem(
            "peers.timeout", "peers.patience", rule="must be at most peers.patience", fix="lower it, or raise patience"
        )


def _peers_of_one_command(context: RuleContext) -> Iterator[Problem]:
    """Places and ports that peers of one machine would share without being meant to."""
    config = context.config
    shared = {
        "checkpoint.dir": config.checkpoint.dir != f"{config.run.dir}/checkpoints",
        "zero.offload_optimizer.path": config.zero.offload_optimizer.path is not None,
        "zero.offload_parameters.path": config.zero.offload_parameters.path is not None,
        "launch.master_port": config.launch.master_port is not None,
        "launch.bind": config.launch.bind == "cores",
    }
    for name in (name for name, given in shared.items() if given):
        fix = "use none" if name == "launch.bind" else "remove it, or start each peer by a command of its own"
        yield context.problem(name, "launch.peers", rule="must differ among peers, which have one machine", fix=fix)
    if context.origin(("peers", "signature")).given and peers_of(config).signature != "shared_key":
        rule = "must be shared_key with launch.peers, whose peers trust each other"
        yield context.problem("peers.signature", "launch.peers", rule=rule, fix="remove it")


def keys_are_secret(context: RuleContext) -> Iterator[Problem]:
    own = peers_of(context.config)
    if not joins(context.config):
        return
    if own.key_file is None:
        fix = "make one with: deepy peers key FILE"
        yield context.problem("peers.key_file", rule="must be given: contributions are signed", fix=fix)
    elif context.here and (wrong := wrong_key(own.key_file)):
        yield context.problem("peers.key_file", rule=wrong, fix="make one with: deepy peers key FILE")
    if own.signature == "shared_key":
        if own.public_keys:
            yield context.problem(
                "peers.public_keys", "peers.signature", rule="must be empty with shared_key", fix="remove them"
            )
        return
    served = {SERVER} if (own.folder or "").startswith(TCP) else set()
    if set(own.public_keys) != {*own.members, *served} or not all(map(HEX.fullmatch, own.public_keys.values())):
        yield context.problem(
            "peers.public_keys peers.members",
            rule="must have one key of 64 hexadecimal digits for each member"
            + (f", and the key of `deepy peers serve` as {SERVER}" if served else ""),
            fix="each peer prints its own with: deepy peers key FILE",
        )
    elif len(set(own.public_keys.values())) < len(own.public_keys):
        yield context.problem("peers.public_keys", rule="must differ", fix="make a key for each peer")
    if context.here and all(find_spec(each) is None for each in LIBRARIES):
        yield context.problem(
            "peers.signature",
            rule=f"must have a package that signs by Ed25519: {missing('nacl')}",
            fix="install it, or use peers.signature=shared_key among peers that trust each other",
        )


def wrong_key(path: str) -> str | None:
    """The rule that a file of a secret key breaks, or None."""
    try:
        file = Path(path).expanduser()
        text, mode = file.read_text(encoding="ascii").strip(), file.stat().st_mode
    except (OSError, ValueError) as error:
        return f"must be a file that can be read ({type(error).__name__})"
    if not HEX.fullmatch(text):
        return "must be a file of 64 hexadecimal digits"
    values = bytes.fromhex(text)
    steps = {(b - a) % 256 for a, b in zip(values, values[1:])}
    if len(set(values)) < 16 or len(steps) < 8:
        return "must be a random key: everyone can guess this one, as keys of examples"
    return "must be readable by its owner only (chmod 600)" if mode & 0o077 else None


def rounds_fit(context: RuleContext) -> Iterator[Problem]:
    own, training = peers_of(context.config), context.config.training
    if own.every is None or not joins(context.config):
        return
    if own.algorithm not in (STREAMING, DECOUPLED) and (own.fragments, own.delay, own.alpha) != (1, 0, 0.0):
        yield context.problem(
            "peers.algorithm peers.fragments peers.delay peers.alpha",
            rule="must be streaming_diloco or decoupled with fragments, delay or alpha",
            fix="change peers.algorithm, or remove them",
        )
        return
    if own.every % own.fragments or own.delay >= interval(own):
        yield context.problem(
            "peers.every peers.fragments peers.delay",
            rule="must be a multiple of peers.fragments, and peers.delay less than the steps between two fragments",
            fix=f"use peers.every={own.fragments * max(own.delay + 1, -(-own.every // own.fragments))}",
        )
        return
    if training.steps % interval(own):
        yield context.problem(
            "training.steps peers.every",
            rule=f"must be a multiple of {interval(own)}: steps after the last round would not be shared",
            fix=f"use {-(-training.steps // interval(own)) * interval(own)}",
        )


def run_can_be_shared(context: RuleContext) -> Iterator[Problem]:
    config, own = context.config, peers_of(context.config)
    if not joins(context.config):
        return
    if own.algorithm == GRADIENTS:
        yield from _gradients_can_be_shared(context)
    elif own.slots is not None or own.lost_slots != "compute":
        yield context.problem(
            "peers.slots peers.lost_slots peers.algorithm",
            rule="must go with peers.algorithm: gradients",
            fix="remove them",
        )
    if config.training.epochs is not None:
        yield context.problem(
            "training.epochs",
            rule="must not be given with peers, which read the data together",
            fix="give training.steps",
        )
    if (kind := optimizer_kind(config)) is not None and kind.averages:
        yield context.problem(
            "optimizer.type", rule="must evaluate the weights that it trains: peers exchange them", fix="use adamw"
        )
    if "align" in wanted_features(config):
        fix = "remove the section peers"
        yield context.problem("peers.every", rule="must not be given with align", fix=fix)


def options_have_an_effect(context: RuleContext) -> Iterator[Problem]:
    own = peers_of(context.config)
    if not joins(context.config):
        return
    unused: dict[str, Any] = {} if own.algorithm == SPARSE else {"top": 64, "decay": 0.95}
    unused |= {"outer_lr": 0.7, "outer_momentum": 0.9, "scorer": None} if own.algorithm == GRADIENTS else {}
    for name, default in unused.items():
        if getattr(own, name) != default:
            yield context.problem(
                f"peers.{name}",
                "peers.algorithm",
                rule=f"must not be given with {own.algorithm}, which has no such step",
                fix="remove it",
            )


def _gradients_can_be_shared(context: RuleContext) -> Iterator[Problem]:
    config, own = context.config, peers_of(context.config)
    if own.every != 1:
        yield context.problem(
            "peers.every", "peers.algorithm", rule="must be 1: peers exchange the gradients of each step", fix="use 1"
        )
    if config.precision.compute == "fp16":
        yield context.problem(
            "precision.compute", rule="must have no loss scale that depends on the steps of one peer", fix="use bf16"
        )
    if config.parallel.communication.compress.data in FEEDS_BACK:
        yield context.problem(
            "parallel.communication.compress.data",
            rule="must keep no error of one peer: another could not repeat its gradients",
            fix="use none",
        )
    others = sorted({"spikes", "audit", "noise_scale", "statistics"} & wanted_features(config).keys())
    if others:
        yield context.problem(
            "peers.algorithm",
            rule=f"must not be gradients with {', '.join(others)}, which read the gradients or updates of one peer",
            fix=f"remove {', '.join(others)}",
        )


def share(config: Any) -> tuple[int, int]:
    """This peer's share of each global batch, and the number of shares."""
    own, members = peers_of(config), peers_of(config).members
    return (members.index(own.name or "") % slots_of(own), slots_of(own)) if joins(config) else (0, 1)


def exchanges_gradients(config: Any) -> bool:
    own = peers_of(config)
    return joins(config) and own.algorithm == GRADIENTS


STATUS = "megatron.features.peers.status:status"
FEATURE = Feature(
    about="Runs that meet over slow links.",
    wanted=lambda config: joins(config) and not exchanges_gradients(config),
    keys=(TOP,),
    rules=(names_are_of_members, keys_are_secret, rounds_fit, run_can_be_shared, options_have_an_effect),
    engine="megatron.features.peers.part:OuterState",
    hook="megatron.features.peers.hook:PeersHook",
    hook_before=("average",),  # which reads the weights, as evaluations do: they are the common ones after a round
    status=STATUS,
    share=share,
    # Shares of the data and rounds follow from these.
    identity=("peers.members", "peers.name", "peers.every", "peers.fragments", "peers.delay"),
)
SLOTS = Feature(
    about="Runs that share the gradients of each step, and take over from each other.",
    wanted=exchanges_gradients,
    engine="megatron.features.peers.gradients:SlotGradients",
    before=("experts",),  # whose corrections must not move in a step that has no update yet
    hook="megatron.features.peers.slot_hook:SlotHook",
    status=STATUS,
    share=share,
    identity=("peers.members", "peers.name", "peers.slots"),
)
