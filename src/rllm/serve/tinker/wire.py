"""Training requests and results as they travel: protobuf (SDK >= 0.25) and JSON (<= 0.24), to and from numpy.

Knows bytes and shapes; nothing of losses or of what is done with them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from rllm.serve.tinker import proto
from rllm.serve.tinker.errors import ApiError

MAX_TENSOR_ELEMENTS = 16 * 2**20
EMPTY_LOGPROB = -99999.0
"""What an empty cell of top-k log-probabilities holds, beside id 0."""
_DTYPES: dict[int, Any] = {proto.FLOAT32: "<f4", proto.INT64: "<i8", proto.INT32: "<i4", proto.BFLOAT16: "<u2"}
_JSON_DTYPES = {"float32": np.float32, "int64": np.int64}


@dataclass(frozen=True, eq=False)
class Row:
    """One datum: token `ids` [N] and the loss's inputs, float32 or int64, dense."""

    ids: np.ndarray
    inputs: dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """A forward or forward_backward. `digest` is equal for equal requests, whichever form they came in."""

    model_id: str
    seq_id: int | None
    loss_fn: str
    settings: dict[str, float | str]
    rows: list[Row]
    forward_only: bool
    digest: str


@dataclass(frozen=True, eq=False)
class TrainOutput:
    """The result of a forward or forward_backward: log-probabilities [N] or [N, K] of every row, and metrics by ``name:reduction``."""

    logprobs: list[np.ndarray]
    metrics: dict[str, float]

    def as_proto(self) -> bytes:
        message = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=self.metrics)
        start = 0
        while start < len(self.logprobs):  # rows of one width go into one record
            trailing = self.logprobs[start].shape[1:]
            end = start
            while end < len(self.logprobs) and self.logprobs[end].shape[1:] == trailing:
                end += 1
            rows = [np.ascontiguousarray(row, dtype="<f4") for row in self.logprobs[start:end]]
            record = message.loss_fn_outputs.add(num_datums=len(rows))
            tensor = record.fields["logprobs"]
            tensor.data = b"".join(row.tobytes() for row in rows)
            tensor.offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8").tobytes()
            tensor.dtype = proto.FLOAT32
            tensor.trailing_shape.extend(trailing)
            start = end
        return message.SerializeToString()

    def as_json(self) -> dict[str, Any]:
        return {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": [{"logprobs": _tensor_json(row)} for row in self.logprobs],
            "metrics": self.metrics,
        }


@dataclass(frozen=True, eq=False)
class Sampled:
    """One sampled completion; `top` are ids and log-probabilities [M, k] of the likeliest tokens at each place, if asked for."""

    stop_reason: str
    ids: list[int]
    logprobs: list[float]
    top: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True, eq=False)
class SampleOutput:
    """The result of asample. Arrays over the prompt have its length P (or P - 1 for `targets` and `draws`, which have no place 0)."""

    sequences: list[Sampled]
    prompt_logprobs: np.ndarray | None = None
    prompt_top: tuple[np.ndarray, np.ndarray] | None = None
    targets: SparseTensor | np.ndarray | None = None
    draws: tuple[np.ndarray, np.ndarray] | None = None

    def as_proto(self) -> bytes:
        message = proto.SampleResponse()
        for sequence in self.sequences:
            one = message.sequences.add(stop_reason=proto.STOP if sequence.stop_reason == "stop" else proto.LENGTH)
            one.tokens = np.asarray(sequence.ids, "<i4").tobytes()
            one.logprobs = np.asarray(sequence.logprobs, "<f4").tobytes()
            if sequence.top is not None:
                _fill_top(one.topk_sampled_logprobs, sequence.top)
        if self.prompt_logprobs is not None:
            message.prompt_logprobs = self.prompt_logprobs.astype("<f4").tobytes()
        if self.prompt_top is not None:
            _fill_top(message.topk_prompt_logprobs, self.prompt_top)
        if self.targets is not None:
            _fill_tensor(message.target_prompt_logprobs, self.targets)
        if self.draws is not None:
            _fill_tensor(message.prompt_alt_tokens.tokens, self.draws[0])
            _fill_tensor(message.prompt_alt_tokens.logprobs, self.draws[1])
        return message.SerializeToString()

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "type": "sample",
            "sequences": [
                {"stop_reason": s.stop_reason, "tokens": s.ids, "logprobs": s.logprobs} for s in self.sequences
            ],
        }
        if self.prompt_logprobs is not None:
            told["prompt_logprobs"] = [None if math.isnan(v) else v for v in self.prompt_logprobs.tolist()]
        if self.prompt_top is not None:
            ids, values = (part.tolist() for part in self.prompt_top)
            told["topk_prompt_logprobs"] = [
                None if row[0] == EMPTY_LOGPROB else list(zip(places, row, strict=True))
                for places, row in zip(ids, values, strict=True)
            ]
        return told


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """CSR: `values` of the listed cells of a matrix of `shape`, row after row."""

    values: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    shape: tuple[int, int]

    def dense(self, fill: float = 0) -> np.ndarray:
        full = np.full(self.shape, fill, self.values.dtype)
        full[self.row_numbers, self.columns] = self.values
        return full

    @property
    def row_numbers(self) -> np.ndarray:
        return np.repeat(np.arange(self.shape[0]), np.diff(self.rows))

    def like(self, dense: np.ndarray) -> SparseTensor:
        """The same cells of another matrix."""
        return SparseTensor(dense[self.row_numbers, self.columns], self.rows, self.columns, self.shape)


def train_request_of_proto(body: bytes) -> TrainRequest:
    """Raises `ApiError` for bytes that are no such request."""
    message = proto.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ApiError(f"the body is no protobuf ForwardBackwardRequest: {error}") from error
    number = message.seq_id or None
    try:
        rows = [_row_of_proto(datum, f"data[{i}]") for i, datum in enumerate(message.data)]
    except ApiError as error:
        error.request = (message.model_id, number)
        raise
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        settings[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return _train_request(message.model_id, number, message.loss_fn, settings, rows, message.forward_only)


def _row_of_proto(datum: Any, where: str) -> Row:
    """Where tokens were sampled (the spans) matters to stable_reinforce alone, which is refused."""
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("value")
        if kind != "encoded_text":
            raise ApiError(f"{where}.model_input: a chunk of kind {kind or 'unknown'}; only token chunks are served")
        parts.append(_frombuffer(chunk.encoded_text.tokens, "<i4", f"{where}.model_input"))
    inputs = {
        key: _dense(_tensor_of_proto(value, f"{where}.loss_fn_inputs.{key}"))
        for key, value in datum.loss_fn_inputs.items()
    }
    return Row(np.concatenate(parts) if parts else np.empty(0, np.int32), inputs)


def train_request_of_json(body: Mapping[str, Any], forward_only: bool) -> TrainRequest:
    """The form of SDK <= 0.24. Raises `ApiError` naming what is wrong."""
    given = body.get("forward_input" if forward_only else "forward_backward_input")
    if given is None:
        given = body.get("forward_backward_input")
    if not isinstance(given, dict):
        raise ApiError("forward_backward_input is missing; expected an object with data and loss_fn")
    data, settings = given.get("data"), given.get("loss_fn_config") or {}
    if not isinstance(data, list) or not isinstance(given.get("loss_fn"), str) or not isinstance(settings, dict):
        raise ApiError(
            "forward_backward_input: expected data (a list), loss_fn (text) and, if any, loss_fn_config (an object)"
        )
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ApiError(f"loss_fn_config.{key}: expected a number or text, found {type(value).__name__}")
    model_id, seq_id = body.get("model_id"), body.get("seq_id")
    if not isinstance(model_id, str):
        raise ApiError("model_id is missing; expected text")
    if seq_id is not None and (isinstance(seq_id, bool) or not isinstance(seq_id, int)):
        raise ApiError(f"seq_id: expected a whole number, found {seq_id!r}")
    rows = []
    for i, datum in enumerate(data):
        if not isinstance(datum, dict) or not isinstance(datum.get("loss_fn_inputs"), dict):
            raise ApiError(f"data[{i}]: expected an object with model_input and loss_fn_inputs")
        ids = tokens_of_json(datum.get("model_input"), f"data[{i}].model_input")
        inputs = {
            str(key): _dense(tensor_of_json(value, f"data[{i}].loss_fn_inputs.{key}"))
            for key, value in datum["loss_fn_inputs"].items()
        }
        rows.append(Row(np.asarray(ids, np.int32), inputs))
    return _train_request(model_id, seq_id, given["loss_fn"], settings, rows, forward_only)


def tokens_of_json(given: Any, where: str) -> list[int]:
    """Token ids of a ModelInput as JSON; other chunks than text are refused."""
    chunks = given.get("chunks") if isinstance(given, dict) else None
    if not isinstance(chunks, list):
        raise ApiError(f"{where}: expected an object with a list of chunks")
    ids: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else type(chunk).__name__
        if kind != "encoded_text":
            raise ApiError(f"{where}: a chunk of kind {kind}; only token chunks (encoded_text) are served")
        tokens = chunk.get("tokens")
        if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < 2**31 for t in tokens):
            raise ApiError(f"{where}: tokens must be a list of token ids")
        ids += tokens
    return ids


def tensor_of_json(given: Any, where: str) -> np.ndarray | SparseTensor:
    """A TensorData as JSON: `data` flat, `dtype`, `shape` (default: flat), CSR indices if sparse."""
    if not isinstance(given, dict) or given.get("dtype") not in _JSON_DTYPES or not isinstance(given.get("data"), list):
        raise ApiError(f"{where}: expected an object with data (a list) and dtype (float32 or int64)")
    kinds = (int,) if given["dtype"] == "int64" else (int, float)
    if not all(type(value) in kinds for value in given["data"]):
        raise ApiError(f"{where}: data must be numbers of dtype {given['dtype']}")
    try:
        with np.errstate(over="ignore"):
            values = np.asarray(given["data"], _JSON_DTYPES[given["dtype"]])
    except OverflowError as error:
        raise ApiError(f"{where}: {error}") from error
    shape = given.get("shape")
    if shape is not None and not (isinstance(shape, list) and all(type(n) is int for n in shape)):
        raise ApiError(f"{where}: shape must be a list of whole numbers")
    crow, col = given.get("sparse_crow_indices"), given.get("sparse_col_indices")
    if crow is None and col is None:
        return _shaped(values, shape, where)
    for name, indices in (("sparse_crow_indices", crow), ("sparse_col_indices", col)):
        if not isinstance(indices, list) or not all(type(n) is int and abs(n) < 2**62 for n in indices):
            raise ApiError(f"{where}: {name} must be a list of whole numbers")
    assert crow is not None and col is not None
    return _sparse(values, np.asarray(crow, np.int64), np.asarray(col, np.int64), shape or [], where)


def _train_request(
    model_id: str, seq_id: int | None, loss_fn: str, settings: dict[str, float | str], rows: list[Row], only: bool
) -> TrainRequest:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((model_id, seq_id, loss_fn, sorted(settings.items(), key=str), only, len(rows))).encode())
    for row in rows:
        for name, values in (("", row.ids), *sorted(row.inputs.items())):
            digest.update(repr((name, values.dtype.str, values.shape)).encode())
            digest.update(np.ascontiguousarray(values).tobytes())
    return TrainRequest(model_id, seq_id, loss_fn, settings, rows, only, digest.hexdigest())


def _tensor_of_proto(message: Any, where: str) -> np.ndarray | SparseTensor:
    if message.dtype not in _DTYPES:
        raise ApiError(f"{where}: dtype {message.dtype} is unknown; expected float32, int64, int32 or bfloat16")
    sparse = message.WhichOneof("value") == "sparse_csr"
    raw = message.sparse_csr.values if sparse else message.dense
    values = _frombuffer(raw, _DTYPES[message.dtype], where)
    if message.dtype == proto.BFLOAT16:  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif message.dtype == proto.INT32:
        values = values.astype(np.int64)
    shape = list(message.shape)
    if not sparse:
        return _shaped(values, shape or None, where)
    crow, col = (
        _frombuffer(part, "<i8", where) for part in (message.sparse_csr.crow_indices, message.sparse_csr.col_indices)
    )
    return _sparse(values, crow, col, shape, where)


def _frombuffer(raw: bytes, dtype: Any, where: str) -> np.ndarray:
    if len(raw) % np.dtype(dtype).itemsize:
        raise ApiError(f"{where}: {len(raw)} bytes are no whole number of {np.dtype(dtype).name} values")
    return np.frombuffer(raw, dtype)


def _shaped(values: np.ndarray, shape: Sequence[int] | None, where: str) -> np.ndarray:
    if shape is None:
        return values
    if any(n < 0 for n in shape) or math.prod(shape) != values.size:
        raise ApiError(f"{where}: {values.size} values do not make shape {list(shape)}")
    return values.reshape(shape)


def _sparse(values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: Sequence[int], where: str) -> SparseTensor:
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > MAX_TENSOR_ELEMENTS:
        raise ApiError(
            f"{where}: a sparse tensor needs a shape [N, K] of at most {MAX_TENSOR_ELEMENTS} elements, not {list(shape)}"
        )
    right = (
        len(crow) == shape[0] + 1
        and crow[0] == 0
        and crow[-1] == len(values) == len(col)
        and bool((np.diff(crow) >= 0).all())
        and bool(((col >= 0) & (col < shape[1])).all())
    )
    if not right:
        raise ApiError(f"{where}: the CSR indices do not fit {len(values)} values in shape {list(shape)}")
    return SparseTensor(values, crow, col, (shape[0], shape[1]))


def _dense(tensor: np.ndarray | SparseTensor) -> np.ndarray:
    return tensor.dense() if isinstance(tensor, SparseTensor) else tensor


def _fill_top(message: Any, top: tuple[np.ndarray, np.ndarray]) -> None:
    ids, values = top
    message.token_ids, message.logprobs = ids.astype("<i4").tobytes(), values.astype("<f4").tobytes()
    message.length, message.k = ids.shape


def _fill_tensor(message: Any, tensor: np.ndarray | SparseTensor) -> None:
    values = tensor.values if isinstance(tensor, SparseTensor) else tensor
    whole = values.dtype.kind == "i"
    raw = values.astype("<i8" if whole else "<f4").tobytes()
    message.dtype = proto.INT64 if whole else proto.FLOAT32
    message.shape.extend(tensor.shape)
    if isinstance(tensor, SparseTensor):
        message.sparse_csr.values = raw
        message.sparse_csr.crow_indices = tensor.rows.astype("<i8").tobytes()
        message.sparse_csr.col_indices = tensor.columns.astype("<i8").tobytes()
    else:
        message.dense = raw


def _tensor_json(values: np.ndarray) -> dict[str, Any]:
    return {"data": values.ravel().tolist(), "dtype": "float32", "shape": list(values.shape)}


def with_empty_start(rows: Iterable[np.ndarray], width: int, count: int, fill: float) -> list[np.ndarray]:
    """Each of `rows` [M, width] below so many rows of `fill` that it has `count`."""
    return [np.concatenate([np.full((count - len(part), width), fill, part.dtype), part]) for part in rows]
