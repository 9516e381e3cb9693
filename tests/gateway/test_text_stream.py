"""Text shown while it is sampled."""

from __future__ import annotations

import random

import pytest
from chat_tokenizers import chat_tokenizer

from rllm.gateway.render import Renderer
from rllm.gateway.text_stream import TextStream


def pieces(text: str, *, chunk: int = 1, **how) -> list[str]:
    renderer = Renderer(chat_tokenizer("qwen3"))
    ids = renderer.tokenize(text)
    stream = TextStream(renderer.decode, **how)
    return [stream.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]


@pytest.mark.parametrize(
    "text", ["hello", "naïve 東京 🙂🙂", " leading and trailing ", "\n\n", "a\ufffdb", "<think>\nso\n</think>"]
)
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_the_pieces_are_the_text(text: str, chunk: int) -> None:
    assert "".join(pieces(text, chunk=chunk)) == text


def test_a_character_is_shown_when_all_of_its_bytes_are_there() -> None:
    shown = pieces("🙂", chunk=1)
    assert len(shown) > 1 and shown[-1] == "🙂" and set(shown[:-1]) == {""}


def test_nothing_of_a_stop_text_is_ever_shown() -> None:
    assert "".join(pieces("12</answer>34", stops=("</answer>",))) == "12"
    shown = pieces("a < b </ans", stops=("</answer>",))
    assert "".join(shown) == "a < b "  # the rest may still become the stop text
    assert "".join(pieces("a </b> c", stops=("</answer>",))) == "a </b> c"


def test_from_a_tool_call_on_nothing_is_shown_nor_the_spaces_before_it() -> None:
    assert "".join(pieces("see  \n<tool_call>{}</tool_call> more", closed_by="<tool_call>")) == "see"


@pytest.mark.parametrize("seed", range(30))
def test_random_tokens_come_to_the_same_text_as_decoded_at_once(seed: int) -> None:
    renderer, rng = Renderer(chat_tokenizer("qwen3")), random.Random(seed)
    ids = [rng.randrange(len(renderer.tokenizer)) for _ in range(200)]
    stream, shown, i = TextStream(renderer.decode), "", 0
    while i < len(ids):
        n = rng.randrange(1, 6)
        shown += stream.push(ids[i : i + n])
        i += n
        assert renderer.decode(ids).startswith(shown)
    assert shown + stream.finish(renderer.decode(ids)) == renderer.decode(ids)
