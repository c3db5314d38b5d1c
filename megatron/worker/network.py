"""Addresses of this machine, and the network that all hosts of a run share."""

import errno
import ipaddress
import socket
from dataclasses import dataclass

import psutil

LOOKED_UP = 16  # hosts whose names are resolved: an unknown name may take seconds
_VIRTUAL = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "kube", "tunl")


@dataclass(frozen=True)
class Address:
    """An address of a network interface, with the length of its network's prefix."""

    interface: str
    address: str
    prefix: int

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        return ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False)


def addresses() -> list[Address]:
    """This machine's addresses, IPv4 before IPv6, without link-local ones."""
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, own in psutil.net_if_addrs().items():
            for each in own:
                if each.family == family and not (address := ipaddress.ip_address(each.address)).is_link_local:
                    prefix = (
                        int(ipaddress.ip_address(each.netmask)).bit_count() if each.netmask else address.max_prefixlen
                    )
                    found.append(Address(name, each.address, prefix))
    return found


def free_port(address: str = "") -> int:
    """A TCP port that nothing listens on now."""
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]


def listen_on(address: str, port: int = 0, *, one_host: bool = False) -> socket.socket:
    """A socket bound to an address, which does not listen yet.

    Nothing else is given its port, but who asks for that very port can still bind it: a script that opens torch's own
    store there instead of taking this socket.

    Args:
        address: of this machine, as all hosts call it. The socket takes all addresses if that is not its own, since a
            router translates it. It also does if the name is loopback here, and other hosts call too.
        port: 0 for any.
        one_host: whether only this machine calls.

    Raises:
        OSError: the port is taken.
    """
    try:
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        places = []
    for family, _, _, _, place in places:
        if not one_host and ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
            continue
        try:
            return _bound(family, place)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return _bound(socket.AF_INET, ("", port))


def _bound(family: int, place: tuple) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
    except OSError:
        made.close()
        raise
    return made


def interface_towards(host: str) -> str | None:
    """The interface by which this machine reaches another, or None where that is loopback, or the name is unknown."""
    mine = _own_address_towards(host)
    return next((each.interface for each in addresses() if each.address == mine and each.interface != "lo"), None)


def towards(hosts: list[str], interface: str | None = None) -> list[str]:
    """This machine's own addresses on its ways to some hosts, loopback last: where those hosts can call it.

    Args:
        hosts: names or addresses. Only the first ones are tried.
        interface: the one to be reached by, if this machine has it.

    Returns:
        Never all addresses, unless the resolver knows none of the names (ssh may have its own).
    """
    known = addresses()
    if found := [each.address for each in known if each.interface == interface]:
        return found
    own = dict.fromkeys(address for name in hosts[:LOOKED_UP] if (address := _own_address_towards(name)))
    found = sorted(own, key=lambda address: ipaddress.ip_address(address).is_loopback)
    return found or [each.address for each in known if not each.interface.startswith(_VIRTUAL)] or ["127.0.0.1"]


def _own_address_towards(host: str) -> str | None:
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing: it only asks the routing table
            return probe.getsockname()[0]
    except OSError:
        return None


def shared_network(
    hosts: list[list[Address]], interface: str | None = None, preferred: str | None = None
) -> list[Address] | None:
    """One address per host, all in one network.

    Args:
        hosts: the addresses of each host.
        interface: use this interface only. The networks may then differ, because routers can join them.
        preferred: an address of the first host. Its network is taken if all hosts have it.

    Returns:
        The address of each host, or None where they share no network. Loopback and the private networks of
        containers never count, and neither does a network in which two hosts have the same address.
    """
    if interface:
        named = [each for host in hosts for each in [one for one in host if one.interface == interface][:1]]
        return named if len(named) == len(hosts) else None
    found = shared_networks(hosts)
    return next((chosen for chosen in found if chosen[0].address == preferred), found[0] if found else None)


def shared_networks(hosts: list[list[Address]]) -> list[list[Address]]:
    """Every network that all hosts are in, as the address of each host in it, in the order of the first host's."""
    usable = [[each for each in host if not each.interface.startswith(_VIRTUAL)] for host in hosts]
    found = []
    for candidate in usable[0]:
        others = [[each for each in host if each.network == candidate.network][:1] for host in usable[1:]]
        chosen = [candidate, *(each for found_there in others for each in found_there)]
        if len({each.address for each in chosen}) == len(hosts):
            found.append(chosen)
    return found
