"""Costs of peers: the share of time that they compute over a link, and the work lost by failures. Without torch.

A round of local updates takes the inner steps, an upload of one contribution and a download of the others'. A restart
loses the time to notice the failure, to start all ranks, and on average half of the time since a checkpoint (Young 1974
and Daly 2006). Healing loses one timeout of all peers, and the work of one peer until it is back."""

from dataclasses import dataclass

from megatron.report.ledger import best_interval

DEVICE_HOURS = 50_700.0  # between failures: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783)
CHUNK, SENT_BITS, DENSE_BITS = 4096, 14, 32


@dataclass(frozen=True)
class Link:
    """Seconds and bytes of a round of one peer.

    Attributes:
        sent: bytes of its contribution.
        received: bytes of the others'.
        seconds: of both transfers, one after the other.
        utilisation: share of a round in which it computes.
    """

    sent: float
    received: float
    seconds: float
    utilisation: float


def over_link(
    parameters: float, peers: float, compute: float, upload: float, download: float, top: int | None = 64
) -> Link:
    """A round over a link.

    Args:
        peers: contributors of a round.
        compute: seconds of the inner steps.
        upload, download: bits per second.
        top: values that are sent of 4,096 (sparseloco). None sends all differences in fp32.
    """
    bits = DENSE_BITS if top is None else SENT_BITS * top / CHUNK
    sent = parameters * bits / 8
    received = sent * (peers - 1)
    seconds = 8 * sent / upload + 8 * received / download
    return Link(sent, received, seconds, compute / (compute + seconds))


def link_for(parameters: float, peers: float, compute: float, utilisation: float, top: int | None = 64) -> float:
    """Bits per second in each direction at which a peer computes for this share of the time."""
    whole = over_link(parameters, peers, compute, 1.0, 1.0, top).seconds
    return whole / (compute * (1 / utilisation - 1))


@dataclass(frozen=True)
class Failures:
    """Shares of time that are useful.

    Attributes:
        between: seconds between failures of the whole job.
        restart, healing: the two shares. Neither is below 0.
    """

    between: float
    restart: float
    healing: float


def with_failures(
    devices: int,
    peers: float,
    save: float,
    start: float,
    notice: float,
    timeout: float,
    heal: float,
    overhead: float = 0.0,
) -> Failures:
    """Useful time of one job that restarts, and of peers that heal.

    Args:
        devices: of all peers.
        save: seconds that a checkpoint stops the job.
        start: seconds from a failure's notice until the first new step, of all ranks.
        notice: seconds until the job notices a failure.
        timeout: seconds that peers wait for a lost one.
        heal: seconds until a lost peer contributes again.
        overhead: share of a step by which peers are slower than one job, without failures.
    """
    between = DEVICE_HOURS * 3600 / devices
    interval = best_interval(save, between)
    restart = 1 - save / interval - (interval / 2 + start + notice) / between
    healing = (1 - overhead) * (1 - (timeout + heal / peers) / between)
    return Failures(between, max(restart, 0.0), max(healing, 0.0))
