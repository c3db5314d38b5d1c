"""The text of tokens as they come."""

from collections.abc import Sequence

from megatron.data.tokenizer import Tokenizer

CONTEXT = 8  # last tokens of a prompt, by which tokenizers decide whether a space begins what follows


class GrowingText:
    """The text of tokens as they come, up to the first complete stop string.

    A character of several tokens comes when it is whole. A possible beginning of a stop string comes when that is
    decided. Only the newest tokens are decoded: those since the last whole character, and the group before them, since
    some tokenizers write a token differently at the beginning of a text.

    Args:
        keep_stop: whether the stop string is a part of the text.
        after: ids before the first one. Their text is not shown.
        least: stops that are complete before this number of tokens are text.

    Attributes:
        stopped: whether a stop string was complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        *,
        after: Sequence[int] = (),
        least: int = 0,
    ) -> None:
        self.tokenizer, self.stops, self.keep_stop = tokenizer, stops, keep_stop
        self.ids: list[int] = []
        self.known, self.before, self.held, self.stopped = 0, "", "", False
        self.least, self.count = least, 0
        before = tokenizer.decode(after)
        if not before.endswith("\ufffd"):
            self.ids, self.known, self.before = list(after), len(after), before

    def add(self, token: int) -> str:
        """The characters that are certain now."""
        self.ids.append(token)
        self.count += 1
        text = self.tokenizer.decode(self.ids)
        if self.stopped or text.endswith("\ufffd") or not text.startswith(self.before):
            return ""
        new = text[len(self.before) :]
        self.ids = self.ids[self.known :]
        self.known, self.before = len(self.ids), self.tokenizer.decode(self.ids)
        return self._sure(new)

    def rest(self) -> str:
        """The characters that are left when no token follows."""
        if self.stopped:
            return ""
        found = self._sure(self.tokenizer.decode(self.ids)[len(self.before) :])
        return found if self.stopped else found + self.held

    def _sure(self, new: str) -> str:
        self.held += new
        ends = [(self.held.find(stop), stop) for stop in self.stops if stop in self.held]
        if ends and self.count >= self.least:
            begin, stop = min(ends)
            self.stopped = True
            return self.held[: begin + (len(stop) if self.keep_stop else 0)]
        sure = len(self.held) - max((_begun(self.held, stop) for stop in self.stops), default=0)
        found, self.held = self.held[:sure], self.held[sure:]
        return found


def _begun(text: str, stop: str) -> int:
    """Number of characters at the end of a text with which a stop string may have begun."""
    return next((length for length in range(len(stop) - 1, 0, -1) if text.endswith(stop[:length])), 0)
