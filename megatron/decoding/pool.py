"""Numbers of the pages in which texts keep their keys and values. Texts share pages with equal beginnings."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from megatron.kinds.common.attention.paged_keys import PAGE


def digests_of(tokens: Sequence[int], before: bytes = b"") -> list[bytes]:
    """Of each whole page of a text the digest of all tokens up to the page's end.

    Args:
        before: the digest of the page before the tokens.
    """
    found = []
    for begin, end in pairwise(range(0, len(tokens) + 1, PAGE)):
        words = ",".join(map(str, tokens[begin:end])).encode()
        found.append(before := hashlib.blake2b(before + words, digest_size=16).digest())
    return found


class Pool:
    """Pages 1 ... `pages`. A page that no text uses keeps its content and its digest until it is taken again.

    Attributes:
        uses: texts that use each page.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.uses = [0] * (pages + 1)
        self.free = OrderedDict.fromkeys(range(1, pages + 1))  # the one that was released first is taken first
        self.digests: dict[int, bytes] = {}
        self.known: dict[bytes, int] = {}

    def take(self) -> int:
        """A page of no text. KeyError without one."""
        page, _ = self.free.popitem(last=False)
        digest = self.digests.pop(page, None)
        if digest is not None:
            del self.known[digest]
        self.uses[page] = 1
        return page

    def share(self, page: int) -> int:
        """The page, with one more use."""
        if not self.uses[page]:
            del self.free[page]
        self.uses[page] += 1
        return page

    def release(self, table: Sequence[int]) -> None:
        """Give up a use of each page. The last pages are taken again before the first, which more texts begin with."""
        for page in reversed(table):
            if self.uses[page] < 1:
                raise RuntimeError(f"page {page} is released more often than it is used")
            self.uses[page] -= 1
            if not self.uses[page]:
                self.free[page] = None

    def name(self, page: int, digest: bytes) -> None:
        """Note the content of a whole page, unless another page has it."""
        if digest not in self.known and page not in self.digests:
            self.known[digest], self.digests[page] = page, digest

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest beginning that is known."""
        found = []
        for digest in digests:
            if digest not in self.known:
                break
            found.append(self.known[digest])
        return found
