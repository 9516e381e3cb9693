"""The tokenizer of the embedded default model: byte-level BPE trained on its demonstrations, Qwen's chat markers and template.

Any text encodes (bytes are the alphabet); each digit is a token, with or without the space before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 640
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("<answer>", "</answer>")
SPLIT = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ENGLISH = """The quick brown fox jumps over the lazy dog. Please write a short answer to the question below and explain each step.
You are a helpful assistant. Think about the problem, then give the result. What is the name of this place? It was made in the
year when people began to work with numbers, letters and words. There are many ways to say the same thing, and some of them are
better than others. I would like to know how this works, why it does not, and what we can do about it. Thank you very much."""


def train_tokenizer(texts: Iterable[str], out: Path) -> PreTrainedTokenizerFast:
    """Train on `texts` and save a folder that transformers loads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(WORDS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, ENGLISH], trainer)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    return fast
