"""From messages to the text that the chat template writes, and from that text to tokens and back.

Knows the tokenizer and its template; nothing of calls or sessions.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.gateway import hermes
from rllm.gateway.errors import RequestError
from rllm.gateway.messages import arguments_of, tool_call
from rllm.types import Message

# The prompts of a group are alike; texts longer than this are tokenized again rather than kept.
CACHED_TEXTS, CACHED_CHARACTERS = 1024, 32_768
# A Unicode noncharacter put inside a chat marker that stands in a message: the text is tokenized in pieces cut here, so no
# message can write the token that ends a turn.
_CUT = "\ufdd0"
_PROBE = "rllm_probe"
# Byte-level tokenizers write each byte as a character: printable Latin-1 as itself, the others as those from U+0100 on, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Renderer:
    """The tokenizer and its chat template. Safe to use from several threads."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.markers, self._tool_markers = _markers(tokenizer)
        kept = (hermes.OPEN, hermes.CLOSE, "<think>", "</think>")
        self._hidden = frozenset(tokenizer.all_special_ids) | {
            token
            for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items()
            if added.special and added.content not in kept
        }
        # No token stands for more characters of a text than this; composing accents makes up to three characters one.
        vocabulary = tokenizer.get_vocab()
        self.most_characters = 3 * max(map(len, vocabulary))
        # Tokens that are written as they are; the others are written in the tokenizer's own alphabet.
        self._whole = frozenset(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
        self._byte_level = all(character in vocabulary for character in "ĠĊÃâ")  # some vocabularies lack rare bytes
        self._encoded: OrderedDict[str, list[int]] = OrderedDict()
        self._speaks_hermes: dict[str, bool] = {}
        self._lock = threading.Lock()

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as the template writes it up to where the assistant speaks, with markers inside the messages cut.

        Tools, calls and results are the template's where it writes them in Hermes' form, else `hermes.write_out`'s.
        """
        guarded = [self._guarded(message) for message in messages]
        given: list[Any] = [self._guard_values(tool) for tool in tools]
        has_calls = any(message["role"] == "tool" or message.get("tool_calls") for message in guarded)
        if (given or has_calls) and not self.speaks_hermes():
            guarded, given = hermes.write_out(guarded, given), []
        return self._apply(guarded, given, settings or {})

    def encode(self, text: str) -> list[int]:
        """Tokens of what `text` gave."""
        with self._lock:
            known = self._encoded.get(text)
            if known is not None:
                self._encoded.move_to_end(text)
                return list(known)
        ids = [token for piece in text.split(_CUT) if piece for token in self.tokenize(piece)]
        if len(text) <= CACHED_CHARACTERS:
            with self._lock:
                self._encoded[text] = list(ids)
                if len(self._encoded) > CACHED_TEXTS:
                    self._encoded.popitem(last=False)
        return ids

    def tokenize(self, text: str) -> list[int]:
        """A raw prompt: special tokens in it are meant."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled tokens without the tokens of structure."""
        shown = [token for token in ids if token not in self._hidden]
        return self.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text; part of a character for some, nothing for those that only fill up the model's vocabulary."""
        raw = self.tokenizer.convert_ids_to_tokens(token)
        if raw is None:
            return b""
        if token in self._whole:
            return raw.encode()
        if self._byte_level:
            return bytes(_BYTE_OF[character] for character in raw if character in _BYTE_OF)
        byte = _BYTE_TOKEN.fullmatch(raw)
        return bytes([int(byte[1], 16)]) if byte else raw.replace("\u2581", " ").encode()

    def marker(self, token: int) -> str | None:
        """The text of a token of structure, None for any other."""
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        return text if text in self.markers else None

    def guard(self, text: str, markers: Sequence[str] | None = None) -> str:
        """`text` with every marker in it cut, so that it is tokenized as plain text."""
        if _CUT in text:  # no character of any text: Unicode keeps it for uses like this one
            text = text.replace(_CUT, "\ufffd")
        for marker in self.markers if markers is None else markers:
            if marker in text:
                text = text.replace(marker, marker[0] + _CUT + marker[1:])
        return text

    def speaks_hermes(self) -> bool:
        """Whether the template itself writes tools, and calls in Hermes' form."""
        template = str(self.tokenizer.chat_template)
        if template not in self._speaks_hermes:
            tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}
            call = tool_call("", "said", "{}")
            call["function"]["arguments"] = {}
            chat: list[Message] = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "told"},
            ]
            try:
                text = self._apply(chat, [tool], {})
            except RequestError:
                text = ""
            said = text.find('"said"')
            self._speaks_hermes[template] = _PROBE in text and hermes.OPEN in text[:said] and "told" in text[said:]
        return self._speaks_hermes[template]

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any], settings: Mapping[str, Any]) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **settings
            )
        except Exception as error:  # templates raise what they like
            raise RequestError(f"the chat template cannot render these messages: {error}", "messages") from error
        return text

    def _guarded(self, message: Message) -> Message:
        markers = self._tool_markers if message["role"] == "tool" else self.markers
        guarded = {**message, "content": self.guard(message["content"], markers)}
        if "reasoning_content" in message:
            guarded["reasoning_content"] = self.guard(message["reasoning_content"])
        if "tool_calls" in message:
            guarded["tool_calls"] = [
                tool_call(
                    call["id"],
                    self.guard(call["function"]["name"], self._tool_markers),
                    self._guard_values(arguments_of(call)),
                )
                for call in message["tool_calls"]
            ]
        return guarded

    def _guard_values(self, value: Any) -> Any:
        """A JSON value with the markers in all of its texts cut."""
        if isinstance(value, str):
            return self.guard(value, self._tool_markers)
        if isinstance(value, Mapping):
            return {self._guard_values(name): self._guard_values(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._guard_values(inner) for inner in value]
        return value


def _markers(tokenizer: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(texts that the tokenizer reads as structure, those and the tags that are tokens, such as ``</tool_response>``), longest
    first. A user may want to write such a tag; what a tool returns must not end its own result."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    tags = {token.content for token in added if token.content.startswith("<") and token.content.endswith(">")}

    def longest_first(texts: set[str]) -> tuple[str, ...]:
        return tuple(sorted((text for text in texts if len(text) > 1), key=len, reverse=True))

    return longest_first(special), longest_first(special | tags)
