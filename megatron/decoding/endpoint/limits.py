"""Limits on everything that a client can ask for, and refusals in OpenAI's form."""

import ipaddress
from dataclasses import dataclass
from typing import Any

CHOICES = 64  # `n`
TEXTS = 256  # of one request: prompts times `n`
STOPS, STOP = 16, 256  # stop strings, and characters of one
LIKELIEST = 20  # alternatives of a token


def of_this_machine(host: str) -> bool:
    """Whether only this machine can be reached by a name or an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Limits:
    """Limits that a user of `deepy serve` can choose."""

    longest: int  # tokens of a prompt and its continuation
    queue: int = 512  # texts of all requests that are unfinished
    body: int = 2 << 20  # bytes of a request
    connections: int = 256  # open at a time
    seconds: float = 600.0  # for an answer
    patience: float = 30.0  # seconds in which a client must send its request, or read a piece of the answer


class Refusal(Exception):
    """A request that is refused.

    Args:
        status: of HTTP.
        param: the request's key.
        code: OpenAI's word for the reason.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
