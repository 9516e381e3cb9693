"""The protobuf messages of Tinker's wire format, described here field by field: no generated module and no SDK is needed.

Field numbers are those of SDK 0.38 (package ``tinker_public``, proto3). The descriptors live in a pool of their own, so that the SDK may be
loaded in the same process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
STOP, LENGTH = 0, 1

# message -> fields "number kind name"; kind is a scalar, a message or an enum; "*" repeats, "?" has presence, "|" is part of a oneof,
# "<K,V>" is a map.
_MESSAGES: dict[str, tuple[str, ...]] = {
    "EncodedTextChunk": ("1 bytes tokens",),
    "ImageChunk": ("1 bytes data", "2 string format", "3 int32? expected_tokens"),
    "DmelChunk": ("1 bytes dmel",),
    "Chunk": ("1 EncodedTextChunk| encoded_text", "2 ImageChunk| image", "3 DmelChunk| dmel"),
    "SparseCsr": ("1 bytes values", "2 bytes crow_indices", "3 bytes col_indices"),
    "Tensor": ("1 bytes| dense", "2 SparseCsr| sparse_csr", "3 DType dtype", "4 int64* shape"),
    "ProvenanceSpan": ("1 PromptProvenanceSpan| prompt_tokens", "2 SampledProvenanceSpan| sampled_tokens"),
    "PromptProvenanceSpan": ("1 string sequence_id", "2 int64 offset", "3 int64 length"),
    "SampledProvenanceSpan": ("1 string sequence_id", "2 int64 offset", "3 int64 length"),
    "Datum": (
        "1 Chunk* model_input",
        "2 <string,Tensor> loss_fn_inputs",
        "3 ProvenanceSpan* model_input_spans",
        "4 ProvenanceSpan* loss_fn_input_spans",
    ),
    "LossConfigValue": ("1 double| number", "2 string| text"),
    "ForwardBackwardRequest": (
        "1 string model_id",
        "2 int32 seq_id",
        "3 Datum* data",
        "4 string loss_fn",
        "5 <string,double> loss_fn_config",
        "6 bool forward_only",
        "7 <string,LossConfigValue> loss_fn_config_v2",
    ),
    "BatchedTensor": ("1 bytes data", "2 bytes offsets", "3 DType dtype", "4 int64* trailing_shape"),
    "ArrayRecord": ("1 string type_tag", "2 <string,BatchedTensor> fields", "3 int64 num_datums"),
    "ForwardBackwardOutput": (
        "1 string loss_fn_output_type",
        "2 ArrayRecord* loss_fn_outputs",
        "3 <string,double> metrics",
    ),
    "TopkLogprobs": ("1 bytes token_ids", "2 bytes logprobs", "3 uint32 k", "4 uint32 length"),
    "SampledSequence": (
        "1 StopReason stop_reason",
        "2 bytes tokens",
        "3 bytes? logprobs",
        "4 TopkLogprobs? topk_sampled_logprobs",
    ),
    "PromptAltTokens": ("1 Tensor tokens", "2 Tensor logprobs"),
    "SampleResponse": (
        "1 SampledSequence* sequences",
        "2 bytes? prompt_logprobs",
        "3 TopkLogprobs? topk_prompt_logprobs",
        "4 int32 prompt_cache_hit_tokens",
        "5 Tensor? target_prompt_logprobs",
        "6 PromptAltTokens? prompt_alt_tokens",
    ),
}
_ENUMS = {
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
}
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
}


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in _ENUMS else _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


def _add_map(message: Any, field: Any, kind: str) -> None:
    """A map is a repeated entry message of key and value."""
    entry = message.nested_type.add(name="".join(part.capitalize() for part in field.name.split("_")) + "Entry")
    entry.options.map_entry = True
    for number, (name, of) in enumerate(zip(("key", "value"), kind[1:-1].split(","), strict=True), start=1):
        _set_type(entry.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL), of)
    field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"


def _add_field(message: Any, text: str, presence: list[Any]) -> None:
    number, kind, name = text.split()
    mark = kind[-1]
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.startswith("<"):
        _add_map(message, field, kind)
        return
    _set_type(field, kind.rstrip("*?|"))
    if mark == "*":
        field.label = _Field.LABEL_REPEATED
    elif mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="value")
        field.oneof_index = 0
    elif mark == "?":
        field.proto3_optional = True
        presence.append(field)


def _describe() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="tinker_public.proto", package=PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        presence: list[Any] = []
        for text in fields:
            _add_field(message, text, presence)
        for field in presence:  # each has a oneof of its own, after the written ones
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _describe()
ForwardBackwardRequest = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput = _CLASSES["ForwardBackwardOutput"]
SampleResponse = _CLASSES["SampleResponse"]
