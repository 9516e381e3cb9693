"""Tokenizers with the chat templates of two families of models.

`qwen3`: built as Qwen3's is (NFC, its way of splitting, tags as tokens) with a small vocabulary, and a template that behaves as Qwen3's
does: tools and calls in Hermes' form, thinking removed from turns before the last question. `smollm2`: SmolLM2-135M-Instruct's own: plain
ChatML with a default system message and no words for tools.
"""

from __future__ import annotations

import functools
import lzma
from pathlib import Path
from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEXTS = [
    "Use the numbers to make the target. The answer is 42, and the user said hello to the assistant.",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}',
    "You are a helpful assistant named after nobody. Let me think about it, then call the function.",
    "Ünïcödé → naïve café 東京 は 晴れ 🙂",
]

# How Qwen2 and Qwen3 split text before merges.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3 = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif -%}
# Tools

Signatures:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' and not message.content.startswith('<tool_response>') -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set content = message.content or '' -%}
    {%- set thought = message.reasoning_content or '' -%}
    {%- if not thought and '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {%- if loop.index0 > ns.last and (loop.last or thought) -%}
      {{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') -}}
    {%- else -%}
      {{- '<|im_start|>assistant\n' + content -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {{- '\n' if content or not loop.first else '' -}}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
      {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""


BOTH = ("qwen3", "smollm2")


@functools.cache
def chat_tokenizer(name: str) -> Any:
    """The tokenizer with its template. Bytes are tokens (all in `qwen3`, all but 21 rare ones in `smollm2`), so broken text can be sampled."""
    return {"qwen3": _qwen3, "smollm2": _smollm2}[name]()


def _smollm2() -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    folder = Path(__file__).with_name("smollm2")
    raw = Tokenizer.from_str(lzma.decompress(folder.joinpath("tokenizer.json.xz").read_bytes()).decode())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = folder.joinpath("chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def _qwen3() -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    raw.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    raw.train_from_iterator(TEXTS, trainer)
    raw.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = QWEN3
    return tokenizer


class ScriptedBackend:
    """A token source for tests of what stands around the sampler: says what `script` gives for a prompt, a text or ids, and gives
    every token a log-probability of its own."""

    model_name = "scripted"
    policy_version = 5

    def __init__(self, tokenizer: Any, max_model_len: int = 100_000):
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.script: Any = lambda prompt_ids: "ok"
        self.said: list[tuple[list[int], list[int], list[float]]] = []
        self.params: list[Any] = []

    async def sample(self, prompt_ids: Any, params: Any, adapter: str = "default", on_token: Any = None) -> Any:
        from rllm.backends.base import Completion

        answer = self.script(list(prompt_ids))
        ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"] if isinstance(answer, str) else list(answer)
        ended = len(ids) < params.max_tokens
        ids = [*ids, self.tokenizer.eos_token_id] if ended else ids[: params.max_tokens]
        for n in range(1, len(ids) + 1):  # the engine ends at the first token that completes a stop text
            if any(stop in self.tokenizer.decode(ids[:n]) for stop in params.stop):
                ids, ended = ids[:n], True
                break
        logprobs = [-(1.0 + (7 * len(prompt_ids) + n) % 97) / 50 for n in range(len(ids))]
        for token, logprob in zip(ids, logprobs, strict=True):
            if on_token is not None:
                on_token(token, logprob)
        self.said.append((list(prompt_ids), ids, logprobs))
        self.params.append(params)
        return Completion(ids, logprobs, [self.policy_version] * len(ids), "stop" if ended else "length")
