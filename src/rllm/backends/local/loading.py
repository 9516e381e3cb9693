"""From a model folder or hub id to a model and a tokenizer, and back to a folder that transformers loads.

Knows the checkpoint format and which architectures our decoder runs; nothing of LoRA or sampling.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rllm.backends.local.language_model import LanguageModel
from rllm.backends.local.model import Decoder, DecoderConfig
from rllm.config.schema import Config
from rllm.errors import ModelError
from rllm.lora.checkpoint import INDEX, SINGLE, plan_shards, weight_files, write_index

logger = logging.getLogger(__name__)
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
DEFAULT_MODEL = Path(__file__).parents[2] / "models" / "default"
MAX_SHARD_BYTES = 4 * 2**30
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "generation_config.json",
)


def resolve_model(path: str, key: str = "model.path") -> Path:
    """Local folder of a model: `default` is the one inside the package, an existing folder itself, else a hub id to download. `key`
    is what an error says was wrong."""
    if path == "default":
        return DEFAULT_MODEL
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ModelError(
            f"{key}: no folder {path!r}; give a folder with config.json and *.safetensors, a hub id such as "
            "'Qwen/Qwen3-0.6B', or 'default'"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except Exception as error:  # the hub client raises many kinds; all mean "not available"
        raise ModelError(
            f"{key}: {path!r} is no local folder and could not be fetched from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); check the name and the network, or give a local folder"
        ) from error


def read_config(folder: Path) -> Any:
    """The transformers config of a model folder that the local backend can run, one way or the other."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path: {folder} has no config.json; give a folder saved with save_pretrained()")
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"model.path: {folder / 'config.json'} cannot be read: {error}") from error
    if getattr(hf, "quantization_config", None) is not None:
        raise ModelError(f"model.path: {folder} is quantised; give the unquantised (bfloat16 or float32) checkpoint")
    return hf


def fast_path_missing(hf: Any, longest: int | None = None) -> str | None:
    """Why our decoder cannot run a model with sequences of `longest` tokens; None if it can."""
    if hf.model_type not in SUPPORTED:
        return f"it is of type {hf.model_type!r}, and the decoder is for {', '.join(SUPPORTED)}"
    if getattr(hf, "hidden_act", "silu") != "silu":
        return f"its activation is {hf.hidden_act!r}, and the decoder knows 'silu'"
    kind = _rope(hf).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return f"its rope type {kind!r} changes with the length"
    if (_rope(hf).get("partial_rotary_factor") or getattr(hf, "partial_rotary_factor", None) or 1.0) != 1.0:
        return "it rotates only a part of each head"
    window = _attention_window(hf)
    if window is not None and longest is not None and longest > window:
        return f"its attention sees {window} tokens, and sequences may have {longest}"
    return None


def wanted_length(config: Config) -> int:
    """Tokens of the longest sequence that a config asks for."""
    return config.model.max_model_len or config.data.max_prompt_length + config.data.max_response_length


def _rope(hf: Any) -> dict[str, Any]:
    rope = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
    return rope


def _attention_window(hf: Any) -> int | None:
    windowed = getattr(hf, "use_sliding_window", hf.model_type == "mistral")
    return getattr(hf, "sliding_window", None) if windowed else None


def decoder_config(hf: Any) -> DecoderConfig:
    """Our decoder's config for a model that it can run."""
    bias = bool(getattr(hf, "attention_bias", False))
    heads = hf.num_attention_heads
    return DecoderConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        n_layers=hf.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=getattr(hf, "num_key_value_heads", None) or heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        intermediate_size=hf.intermediate_size,
        rms_eps=hf.rms_norm_eps,
        max_position=hf.max_position_embeddings,
        tied=bool(hf.tie_word_embeddings),
        qk_norm=hf.model_type == "qwen3",
        qkv_bias=True if hf.model_type == "qwen2" else bias,
        o_bias=bias and hf.model_type != "qwen2",
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        attention_window=_attention_window(hf),
    )


def rotary_frequencies(config: DecoderConfig, hf: Any) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the scale of cos and sin, for every rope type that does not change with the length."""
    rope = _rope(hf)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        theta = rope.get("rope_theta", getattr(hf, "rope_theta", None) or 10000.0)
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / theta**exponent, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return inv_freq, float(scale)


def load_model(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    quantization: Literal["none", "nf4"] = "none",
    longest: int | None = None,
) -> LanguageModel:
    """The model of `folder` for sequences of up to `longest` tokens (None: as many as our decoder can do): our decoder where it can run
    it, else the plain path, which one line of warning then says."""
    hf = read_config(folder)
    missing = fast_path_missing(hf, longest)
    if missing is None:
        return load_decoder(folder, dtype, device, quantization)
    if quantization != "none":
        raise ModelError(
            f"model.quantization={quantization}: {folder} takes the plain path ({missing}), which keeps no 4-bit weights; "
            "set model.quantization=none"
        )
    from rllm.backends.local.plain.loading import load_plain

    model = load_plain(folder, hf, dtype, torch.device(device))
    logger.warning("model.path: %s: %s; so it takes the %s", folder, missing, model.path)
    return model


def load_decoder(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    quantization: Literal["none", "nf4"] = "none",
) -> Decoder:
    """The model of `folder` in `dtype` on `device`. Every tensor of the checkpoint must be used and every weight filled.

    With `quantization` nf4 it is read into the host's memory, and the matrices of its layers go to `device` in 4 bits.
    """
    if quantization == "nf4":
        from rllm.backends.local.quantized import quantize_decoder

        model = load_decoder(folder, dtype)
        quantize_decoder(model, torch.device(device))
        return model
    hf = read_config(folder)
    if missing := fast_path_missing(hf):
        raise ModelError(f"model.path: {folder} cannot be run by the decoder: {missing}")
    config = decoder_config(hf)
    inv_freq, scale = rotary_frequencies(config, hf)
    model = Decoder(config, inv_freq, scale, dtype, device)
    wanted = dict(model.hf_tensors())
    for name, tensor in _checkpoint_tensors(folder, device):
        if name == "lm_head.weight" and config.tied:
            continue
        if name.endswith("rotary_emb.inv_freq"):
            continue
        target = wanted.pop(name, None)
        if target is None:
            raise ModelError(
                f"model.path: {folder} holds the unexpected tensor {name!r}; is config.json the right one?"
            )
        if target.shape != tensor.shape:
            raise ModelError(
                f"model.path: {folder}: {name} has shape {list(tensor.shape)}, config.json says {list(target.shape)}"
            )
        target.data.copy_(tensor)
    if wanted:
        raise ModelError(f"model.path: {folder} lacks {len(wanted)} tensors, e.g. {next(iter(wanted))!r}")
    return model


def _checkpoint_tensors(folder: Path, device: str | torch.device):
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt", device=str(device)) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    yield name, tensors.get_tensor(name)
        except Exception as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"model.path: {file} cannot be read ({error}); the file may be incomplete") from error


def load_tokenizer(folder: Path, key: str = "model.path") -> Any:
    """The tokenizer of a model folder; it must have a chat template and an end-of-turn token. `key` is what an error says was wrong."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the reader raises many kinds for a file that is not as it should be
        raise ModelError(f"{key}: the tokenizer of {folder} cannot be read: {_first_line(error)}") from error
    if not tokenizer.chat_template:
        raise ModelError(
            f"{key}: the tokenizer of {folder} has no chat template; add chat_template.jinja "
            "(an instruct model has one) or choose an instruct model"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{key}: the tokenizer of {folder} names no eos_token; set it in tokenizer_config.json")
    return tokenizer


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def end_of_turn_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a completion: the tokenizer's and those of generation_config.json."""
    ids = {int(tokenizer.eos_token_id)}
    file = folder / "generation_config.json"
    if file.is_file():
        named = json.loads(file.read_text()).get("eos_token_id")
        ids.update(named if isinstance(named, list) else [] if named is None else [named])
    return tuple(sorted(ids))


def save_model(model: LanguageModel, source: Path, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write `model` as a folder that transformers loads, with tokenizer files copied from `source`."""
    out.mkdir(parents=True, exist_ok=True)
    if isinstance(model, Decoder):
        _save_decoder(model, source, out, dtype)
    else:
        from rllm.backends.local.plain.loading import save_plain

        clear_weights(out)
        save_plain(model, out, dtype)
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and source.resolve() != out.resolve():
            shutil.copyfile(source / name, out / name)


def clear_weights(out: Path) -> None:
    """What an earlier save of another shape left would be what readers take."""
    for name in (SINGLE, INDEX):
        (out / name).unlink(missing_ok=True)


def _save_decoder(model: Decoder, source: Path, out: Path, dtype: torch.dtype | None) -> None:
    tensors = dict(model.hf_tensors())
    size = (dtype or model.dtype).itemsize
    shards = plan_shards({name: tensor.numel() * size for name, tensor in tensors.items()}, MAX_SHARD_BYTES)
    clear_weights(out)
    for file, names in shards.items():
        shard = {n: tensors[n].detach().to("cpu", dtype or tensors[n].dtype).contiguous().clone() for n in names}
        save_file(shard, out / file, metadata={"format": "pt"})
    parameters = sum(tensor.numel() for tensor in tensors.values())
    write_index(out, shards, parameters * size, parameters)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype or model.dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
