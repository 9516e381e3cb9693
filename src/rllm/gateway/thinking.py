"""What a model says while thinking, told apart from the answer: ``<think>...</think>`` at the beginning, or opened by the template.

Knows text only.
"""

from __future__ import annotations

from rllm.gateway.text_stream import overlap
from rllm.tools.calls import THINK, THOUGHT


class ThoughtStream:
    """Splits an answer that comes in pieces. However it is cut, the pieces come to the same two texts.

    Spaces around the thought belong to neither. An answer that does not begin with a thought is content, unchanged; one that ends while
    thinking is all thought.
    """

    def __init__(self, opened: bool = False):
        """`opened`: the prompt ends inside of a thought."""
        self._stage = "thinking" if opened else "start"
        self._held = ""
        self._began = False

    def push(self, text: str) -> tuple[str, str]:
        """(thought, content) that are sure now."""
        self._held += text
        if self._stage == "start":
            stripped = self._held.lstrip()
            if stripped.startswith(THINK):
                self._stage, self._held = "thinking", stripped[len(THINK) :]
            elif not THINK.startswith(stripped):
                self._stage = "content"
            else:
                return "", ""
        thought = self._think() if self._stage == "thinking" else ""
        if self._stage == "between":
            self._held = self._held.lstrip()
            self._stage = "content" if self._held else "between"
        content = ""
        if self._stage == "content":
            content, self._held = self._held, ""
        return thought, content

    def finish(self) -> tuple[str, str]:
        """(thought, content) that were held back."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._stage == "thinking" else ("", held)

    def _think(self) -> str:
        if not self._began:
            self._held = self._held.lstrip()
        at = self._held.find(THOUGHT)
        sure = self._held[: at if at >= 0 else len(self._held) - overlap(self._held, THOUGHT)].rstrip()
        self._began = self._began or bool(sure)
        if at >= 0:
            self._stage, self._held = "between", self._held[at + len(THOUGHT) :]
        else:
            self._held = self._held[len(sure) :]
        return sure


def split_thought(text: str, opened: bool = False) -> tuple[str, str]:
    """(thought, content) of a whole answer."""
    stream = ThoughtStream(opened)
    (thought, content), (more_thought, more_content) = stream.push(text), stream.finish()
    return thought + more_thought, content + more_content
