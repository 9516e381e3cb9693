"""What the transport tests share: a tiny real tokenizer, and a backend whose answers depend on the prompt alone.

No model here: what is tested is that every token reaches the step it belongs to.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings

from rllm.backends.base import DEFAULT_ADAPTER, Completion, OnToken, SamplingParams
from rllm.gateway.server import Gateway

# A suite started in the background inherits "ignore" for Ctrl-C; the tests about it, and the processes they start, need the usual answer.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says something of the machine, not of the code.
settings.register_profile("rllm", deadline=None)
settings.load_profile("rllm")

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def character_tokenizer() -> Any:
    """One token a character, plus chat markers (special) and the words of roles."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = ["user", "assistant", "system"]
    symbols = [*markers, "<unk>", *string.printable[:95], "\n", "\u00e9", "\u2192", *words]
    vocabulary = {symbol: i for i, symbol in enumerate(dict.fromkeys(symbols))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in markers])
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in words])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class EchoBackend:
    """Answers a prompt with a digest of its tokens, `delay(prompt text)` seconds later. `answer` may be replaced by a test."""

    model_name = "echo"
    max_model_len = 4096
    policy_version = 3

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        self.delay: Callable[[str], float] = lambda _: 0.0
        self.answer: Callable[[str], str] = lambda text: hashlib.sha256(text.encode()).hexdigest()[:12]
        self.asked: list[tuple[list[int], SamplingParams, str]] = []
        self.cancelled = 0

    async def sample(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        adapter: str = DEFAULT_ADAPTER,
        on_token: OnToken | None = None,
    ) -> Completion:
        self.asked.append((list(prompt_ids), params, adapter))
        text = self.tokenizer.decode(prompt_ids)
        try:
            await asyncio.sleep(self.delay(text))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        ids = self.tokenizer(self.answer(text), add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        reason = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        if on_token is not None:
            for token in ids:
                on_token(token, -0.5)
                await asyncio.sleep(0)
        return Completion(ids, [-0.5] * len(ids), [self.policy_version] * len(ids), reason)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return character_tokenizer()


@pytest.fixture(scope="session")
def running_gateway(tokenizer: Any) -> Iterator[Gateway]:
    with Gateway(EchoBackend(tokenizer), max_prompt_length=2048) as running:  # pyright: ignore[reportArgumentType]
        yield running


@pytest.fixture
def gateway(running_gateway: Gateway) -> Gateway:
    return running_gateway


@pytest.fixture
def backend(running_gateway: Gateway) -> EchoBackend:
    """The backend behind `gateway`, as good as new."""
    echo: Any = running_gateway.model.backend
    echo.reset()
    return echo


@pytest.fixture
def make(tmp_path):
    """``make("qwen3", tie_word_embeddings=False)`` -> (transformers model, our decoder, folder)."""
    from tiny_models import build

    from rllm.backends.local.loading import load_decoder

    def _make(kind: str, **settings):
        folder = tmp_path / kind
        model = build(kind, folder, **settings)
        return model, load_decoder(folder), folder

    return _make
