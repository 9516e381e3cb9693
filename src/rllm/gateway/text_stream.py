"""The text of a completion as it is sampled: only what is sure to be in the answer is shown, and nothing is shown twice.

Knows ids and a decoder; nothing of events or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # what a decoder writes for a character of which bytes are missing


class TextStream:
    """Turns tokens into text, in pieces. Held back: characters of which bytes are missing, the beginning of what may become a stop
    text, and with `closed_by` everything from that text on, with the spaces before it."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), closed_by: str | None = None):
        self._decode, self._stops, self._closed_by = decode, tuple(stops), closed_by
        self._ends = (*self._stops, closed_by) if closed_by else self._stops
        self._ids: list[int] = []
        # Some decoders drop a space at the very beginning, so new tokens are decoded behind the ones before them.
        self._context, self._read = 0, 0
        self._text = ""
        self._shown = 0
        self._closed = False

    def push(self, ids: Sequence[int]) -> str:
        """What can be shown now that these were sampled."""
        self._ids += ids
        known = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        if self._closed or text.endswith(BROKEN):
            return ""
        self._text += text[len(known) :]
        self._context, self._read = self._read, len(self._ids)
        return self._show(self._sure())

    def finish(self, content: str) -> str:
        """What is left to show of the answer."""
        return content[self._shown :]

    def _show(self, until: int) -> str:
        piece = self._text[self._shown : until]
        self._shown = max(self._shown, until)
        return piece

    def _sure(self) -> int:
        """Up to where the text is in the answer whatever comes."""
        found = [at for at in (self._text.find(end, self._shown) for end in self._ends) if at >= 0]
        if found:
            self._closed, until = True, min(found)
        else:
            until = len(self._text) - max((overlap(self._text, end) for end in self._ends), default=0)
        if self._closed_by:
            until = len(self._text[:until].rstrip())
        return until


def overlap(text: str, end: str) -> int:
    """The longest end of `text` with which `end` begins."""
    return next((n for n in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:n])), 0)
