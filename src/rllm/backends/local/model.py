"""One dense decoder (Llama, Mistral, Qwen2, Qwen3) whose forward serves training, prefill and decoding alike.

How tokens see each other is the caller's business (`Attend`), and so are files, sampling and losses.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rllm.backends.local.language_model import Attend, Dropout, LanguageModel, LowRank
from rllm.backends.local.ops import rms_norm, rotate, swiglu
from rllm.backends.local.space import Space
from rllm.backends.local.transfer import to_device
from rllm.errors import ModelError

# The matrices that share an input are stored as one, so that each is one product. Order is the order of the rows.
BLOCKS: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# Where a low-rank update of the output head is found: no layer has this number.
HEAD = (-1, "head")


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and constants of the decoder. Sizes in elements."""

    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    max_position: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool = False
    mlp_bias: bool = False
    attention_window: int | None = None

    def block_rows(self, block: str) -> tuple[int, ...]:
        """Output rows of each matrix in a fused block."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "qkv": (q, kv, kv),
            "o": (self.hidden_size,),
            "gate_up": (self.intermediate_size, self.intermediate_size),
            "down": (self.hidden_size,),
        }[block]

    def block_inputs(self, block: str) -> int:
        """Input columns of a fused block."""
        return {"o": self.n_heads * self.head_dim, "down": self.intermediate_size}.get(block, self.hidden_size)

    def block_has_bias(self, block: str) -> bool:
        return {"qkv": self.qkv_bias, "o": self.o_bias}.get(block, self.mlp_bias)


class FusedLinear(nn.Module):
    """``y = x W^T + b + (x A^T) B^T`` for the matrices of one block stacked along their outputs."""

    def __init__(self, rows: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype, device=device), requires_grad=False) if bias else None
        # What lies around the weight where the CUDA path has moved it.
        self.space: Space | None = None

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor] | None = None, dropout: Dropout | None = None) -> Tensor:
        if pair is None:
            return F.linear(x, self.weight, self.bias)
        if dropout is not None:
            return F.linear(x, self.weight, self.bias) + F.linear(F.linear(dropout(x), pair[0]), pair[1])
        if torch.is_grad_enabled() and not self.weight.requires_grad:
            return LowRankLinear.apply(x, self.weight, self.bias, *pair)
        return F.linear(x, self.weight, self.bias).addmm_(F.linear(x, pair[0]), pair[1].t())


class LowRankLinear(torch.autograd.Function):
    """``y = x W^T + b + (x A^T) B^T`` with W and b frozen.

    Many tokens in float32 go through ``W + B A``, made for this one product and made again in the backward pass: that adds nothing per
    token. In bfloat16 the sum would lose the update's small digits, so both terms are computed, and summed inside the product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        rows, columns = weight.shape
        ctx.merged = weight.dtype == torch.float32 and x.shape[0] * (rows + columns) > rows * columns
        ctx.save_for_backward(x, weight, a, b)
        if ctx.merged:
            return F.linear(x, torch.addmm(weight, b, a), bias)
        return F.linear(x, weight, bias).addmm_(F.linear(x, a), b.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor]:
        (grad,) = grads
        x, weight, a, b = ctx.saved_tensors
        grad_h, h = grad @ b, F.linear(x, a)
        if not ctx.needs_input_grad[0]:
            grad_x = None
        elif ctx.merged:
            grad_x = grad @ torch.addmm(weight, b, a)
        else:
            grad_x = (grad @ weight).addmm_(grad_h, a)
        return grad_x, None, None, grad_h.t() @ x, grad.t() @ h


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU. Works on packed tokens [N, hidden]."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.config, self.index = config, index

        def linear(block: str) -> FusedLinear:
            return FusedLinear(
                sum(config.block_rows(block)), config.block_inputs(block), config.block_has_bias(block), dtype, device
            )

        def vector(size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

        self.qkv, self.o, self.gate_up, self.down = (linear(block) for block in BLOCKS)
        self.input_norm, self.post_norm = vector(config.hidden_size), vector(config.hidden_size)
        # Row 0 normalises the query heads, row 1 the key heads.
        self.qk_norm = (
            nn.Parameter(torch.empty(2, config.head_dim, dtype=dtype, device=device), requires_grad=False)
            if config.qk_norm
            else None
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, lora: LowRank | None) -> Tensor:
        c, n = self.config, x.shape[0]

        def product(block: str, x: Tensor) -> Tensor:
            linear: FusedLinear = getattr(self, block)
            return linear(x) if lora is None else linear(x, lora.pair(self.index, block), lora.dropout)

        h = rms_norm(x, self.input_norm, c.rms_eps)
        qkv = product("qkv", h).view(n, c.n_heads + 2 * c.n_kv_heads, c.head_dim)
        # Queries and keys go through norm and rotation together: half the operations.
        qk, v = qkv.split((c.n_heads + c.n_kv_heads, c.n_kv_heads), dim=1)
        if self.qk_norm is not None:
            weight = torch.cat((self.qk_norm[:1].expand(c.n_heads, -1), self.qk_norm[1:].expand(c.n_kv_heads, -1)))
            qk = rms_norm(qk, weight, c.rms_eps)
        q, k = rotate(qk, cos, sin).split((c.n_heads, c.n_kv_heads), dim=1)
        mixed = attend(self.index, q, k, v)
        x = x + product("o", mixed.reshape(n, -1))
        h = rms_norm(x, self.post_norm, c.rms_eps)
        return x + product("down", swiglu(product("gate_up", h)))


class Decoder(LanguageModel):
    """The whole model. Names on disk are Hugging Face's (`hf_tensors`)."""

    config: DecoderConfig
    inv_freq: Tensor

    def __init__(
        self,
        config: DecoderConfig,
        inv_freq: Tensor,
        rope_scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        self.config, self.rope_scale = config, rope_scale
        self.register_buffer("inv_freq", inv_freq.float().to(device), persistent=False)
        self.embed = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device), requires_grad=False
        )
        self.layers = nn.ModuleList(DecoderLayer(config, i, dtype, device) for i in range(config.n_layers))
        self.final_norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype, device=device), requires_grad=False)
        self.head = (
            None
            if config.tied
            else nn.Parameter(
                torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device), requires_grad=False
            )
        )
        self._rope: tuple[Tensor, Tensor] | None = None
        # How often the layers' weights have moved in memory: what was captured over them before is stale.
        self.moves = 0
        # Where the CUDA path keeps the adapter in training, around those weights.
        self.room: object = None
        self.fused = fused_path_missing(config, torch.device(device), dtype) is None

    @property
    def path(self) -> str:
        return "own decoder, fused CUDA kernels" if self.fused else "own decoder"

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, lora: LowRank | None = None) -> Tensor:
        """Final hidden states [N, hidden] (normalised) of packed tokens `ids` [N] at `positions` [N]."""
        # The residual is kept in float32 from layer to layer: rounded at each of them, it is what loses most of a narrow dtype's digits.
        x = F.embedding(ids, self.embed).float()
        if self.fused and isinstance(attend, PackedCausal) and (lora is None or lora.dropout is None):
            from rllm.backends.local.cuda.train import fused_layers

            x = fused_layers(self, x, attend, lora)
        else:
            cos, sin = self._rotary(positions)
            for layer in self.layers:
                x = layer(x, cos, sin, attend, lora)
        return rms_norm(x, self.final_norm, self.config.rms_eps)

    def logits(self, hidden: Tensor, lora: LowRank | None = None) -> Tensor:
        """[N, vocab] in float32, from hidden states [N, hidden]."""
        logits = FloatLogits.apply(hidden, self.output_weight)
        pair = None if lora is None else lora.pair(*HEAD)
        if lora is not None and pair is not None:
            adapted = hidden if lora.dropout is None else lora.dropout(hidden)
            logits = logits + FloatLogits.apply(F.linear(adapted, pair[0]), pair[1])
        return logits

    def merged(self, lora: LowRank) -> Decoder:
        """A decoder whose layers give without an adapter what these give with `lora`. It shares with this one all but the matrices that
        `lora` changes; those are copies, as they are now."""
        self.rotary_tables()
        result, layers = _shallow(self), []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layers.append(_shallow(layer))
            for block in BLOCKS:
                pair = lora.pair(layer.index, block)
                if pair is not None:
                    linear = _shallow(getattr(layer, block))
                    changed = torch.addmm(linear.weight, pair[1], pair[0])
                    linear.weight = nn.Parameter(changed, requires_grad=False)
                    setattr(layers[-1], block, linear)
        result.layers = nn.ModuleList(layers)
        return result

    @property
    def activation_bytes_per_token(self) -> int:
        """Counted with autograd's saved-tensor hooks on three shapes (within 20 %)."""
        c = self.config
        if (
            self.fused
        ):  # layer input and middle residual (float32), queries/keys/values, attention's result, gate and up
            kept = sum(c.block_rows("qkv")) + c.block_inputs("o") + 2 * c.intermediate_size
            return c.n_layers * (kept * self.dtype.itemsize + 8 * c.hidden_size)
        kept = 8 * (c.hidden_size + (c.n_heads + c.n_kv_heads) * c.head_dim) + 5 * c.intermediate_size
        return kept * c.n_layers * self.dtype.itemsize

    @property
    def output_weight(self) -> Tensor:
        """[vocab, hidden]; the embeddings where the two are tied."""
        return self.embed if self.head is None else self.head

    @property
    def quantized(self) -> bool:
        """Whether the matrices of the layers are kept in 4 bits (`quantized.quantize_decoder`), so that no layer has a `weight`."""
        return any(not isinstance(getattr(layer, block), FusedLinear) for layer in self.layers for block in BLOCKS)

    def parameter_count(self) -> int:
        """Weights of the model, however few bits each is kept in."""
        count = super().parameter_count()
        if self.quantized:  # then the matrices of the layers are no parameters
            count += sum(rows * columns for name, (columns, rows) in self.linear_shapes().items() if name != "lm_head")
        return count

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, view of the weights) for every tensor of the checkpoint. A quantised base has none to give."""
        if self.quantized:
            raise ModelError(
                "model.quantization=nf4: the base is kept in 4 bits and cannot be saved as a full model; save the adapter, and merge it "
                "into the original base with `rllm merge`"
            )
        yield "model.embed_tokens.weight", self.embed
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            prefix = f"model.layers.{i}."
            for block, names in BLOCKS.items():
                linear: FusedLinear = getattr(layer, block)
                rows = self.config.block_rows(block)
                for name, weight in zip(names, linear.weight.split(rows), strict=True):
                    yield f"{prefix}{name}.weight", weight
                if linear.bias is not None:
                    for name, bias in zip(names, linear.bias.split(rows), strict=True):
                        yield f"{prefix}{name}.bias", bias
            yield f"{prefix}input_layernorm.weight", layer.input_norm
            yield f"{prefix}post_attention_layernorm.weight", layer.post_norm
            if layer.qk_norm is not None:
                yield f"{prefix}self_attn.q_norm.weight", layer.qk_norm[0]
                yield f"{prefix}self_attn.k_norm.weight", layer.qk_norm[1]
        yield "model.norm.weight", self.final_norm
        if self.head is not None:
            yield "lm_head.weight", self.head

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Hugging Face name -> (inputs, outputs) of every linear layer, the output head included, in forward order."""
        c = self.config
        shapes = {
            f"model.layers.{i}.{name}": (c.block_inputs(block), rows)
            for i in range(c.n_layers)
            for block, names in BLOCKS.items()
            for name, rows in zip(names, c.block_rows(block), strict=True)
        }
        shapes["lm_head"] = (c.hidden_size, c.vocab_size)
        return shapes

    def block_layout(self) -> dict[tuple[int, str], list[tuple[str, int]]]:
        """For every (layer, fused block) the (Hugging Face name, output rows) of the matrices stacked in it."""
        c = self.config
        layout = {
            (i, block): [
                (f"model.layers.{i}.{name}", rows) for name, rows in zip(names, c.block_rows(block), strict=True)
            ]
            for i in range(c.n_layers)
            for block, names in BLOCKS.items()
        }
        return layout | {HEAD: [("lm_head", c.vocab_size)]}

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, head_dim] in the model's dtype."""
        cos, sin = self.rotary_tables()
        return F.embedding(positions, cos).unsqueeze(1), F.embedding(positions, sin).unsqueeze(1)

    def rotary_tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, head_dim], made once for the longest position; the first half of sin is negative."""
        if self._rope is not None:
            return self._rope
        with torch.inference_mode(False), torch.no_grad():  # whoever asks first, training reads them too
            angles = torch.outer(
                torch.arange(self.config.max_position, device=self.device, dtype=torch.float32), self.inv_freq
            )
            cos, sin = angles.cos() * self.rope_scale, angles.sin() * self.rope_scale
            self._rope = (torch.cat((cos, cos), dim=-1).to(self.dtype), torch.cat((-sin, sin), dim=-1).to(self.dtype))
        return self._rope


Module = TypeVar("Module", bound=nn.Module)


def _shallow(module: Module) -> Module:
    """A module of the same parts, each of which can be replaced without touching the original."""
    result = copy.copy(module)
    result._parameters, result._modules = dict(module._parameters), dict(module._modules)
    return result


class FloatLogits(torch.autograd.Function):
    """``x W^T`` in float32, also from narrower factors: rounded to bfloat16 a logit of 16 may be off by 0.06."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return F.linear(x, weight).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        return (
            grad @ weight if ctx.needs_input_grad[0] else None,
            grad.t() @ x if ctx.needs_input_grad[1] else None,
        )


def fused_path_missing(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the CUDA kernels cannot run a model; None if they can."""
    if device.type != "cuda":
        return "they need a CUDA device"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"their attention is for bfloat16 and float16, not for {dtype}"  # cuDNN's gives NaN for float32, not an error
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if config.head_dim not in (32, 64, 128, 256):
        return f"head_dim {config.head_dim} is not 32, 64, 128 or 256"
    return None


@dataclass
class Above:
    """What tokens of a packed batch see besides their own sequence: those from ``queries[i]`` to ``queries[i + 1]`` all those from
    ``keys[i]`` to ``keys[i + 1]``, int32 both. No range is longer than `longest_queries` and `longest_keys`."""

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int


class PackedCausal:
    """Causal attention inside each sequence of a packed batch.

    `lengths` are the token counts of the sequences, in packing order. Products over features run on packed tokens without padding;
    only the attention itself sees a [sequences, longest] layout. The right padding is never looked at by a real token, so causality
    is the only mask. With `keep`, the keys and values of every layer stay readable in `kept` ([N, kv_heads, head_dim] each). `first` are
    the positions of the sequences' first tokens, if not 0.
    """

    above: Above | None = None

    def __init__(
        self,
        lengths: list[int],
        device: torch.device | str = "cpu",
        keep: bool = False,
        first: list[int] | None = None,
    ):
        self.n, self.longest = len(lengths), max(lengths)
        self.ragged = any(length != self.longest for length in lengths)
        sizes = torch.tensor(lengths)
        ends = torch.cumsum(sizes, 0)
        row = torch.repeat_interleave(torch.arange(self.n), sizes)
        positions = torch.arange(int(ends[-1])) - (ends - sizes)[row]
        self.positions = to_device(positions if first is None else positions + torch.tensor(first)[row], device)
        self.slots = to_device(row * self.longest + positions, device)
        self.last = to_device(ends - 1, device)
        self.bounds = to_device(F.pad(ends, (1, 0)).to(torch.int32), device)
        self.kept: list[tuple[Tensor, Tensor]] | None = [] if keep else None

    def note(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Called with what each layer attends to, [N, kv_heads, head_dim] each."""
        if self.kept is not None:
            self.kept.append((k, v))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.note(layer, k, v)
        return self.flat(attention(*(self.pad(t).transpose(1, 2) for t in (q, k, v))))

    def pad(self, t: Tensor) -> Tensor:
        """[sequences, longest, ...] of packed [N, ...], 0 where a sequence is shorter."""
        if not self.ragged:
            return t.view(self.n, self.longest, *t.shape[1:])
        padded = t.new_zeros(self.n * self.longest, *t.shape[1:]).index_copy(0, self.slots, t)
        return padded.view(self.n, self.longest, *t.shape[1:])

    def flat(self, t: Tensor) -> Tensor:
        """Packed [N, heads, size] of [sequences, heads, longest, size], the inverse of `pad` and a transposition."""
        flat = t.transpose(1, 2).reshape(self.n * self.longest, t.shape[1], -1)
        return flat.index_select(0, self.slots) if self.ragged else flat


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Scaled dot products over [sequences, heads, tokens, head_dim]; k and v may have fewer heads. `seen` says which tokens (last axis) a
    token (last but one) attends to; None: itself and those before it.

    On CPU in float32: torch's backward pass is several times slower in bfloat16 there.
    """
    narrow = q.dtype
    if q.device.type == "cpu" and narrow != torch.float32:
        q, k, v = q.float(), k.float(), v.float()
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=grouped)
    return out.to(narrow)
