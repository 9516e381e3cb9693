"""JSON bodies of the API, as far as they matter here. A key that is not known is refused where it would change what is done."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from rllm.serve.tinker.errors import ApiError

Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
SeqId = Annotated[int, Field(ge=0, lt=2**62)]
Ttl = Annotated[int, Field(ge=1, le=315_360_000)]  # ten years
Finite = Annotated[float, Field(allow_inf_nan=False)]
MOST_SAMPLES = 4096
MOST_TOP_K = 1024


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=True)


class Loose(BaseModel):
    """What clients say about themselves: more of it does no harm."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateSession(Loose):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionBody(Loose):
    session_id: str


class Finish(Loose):
    reason: dict[str, Any] = {}
    detail: str | None = None


class LoraBody(Body):
    rank: int
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    session_id: str
    model_seq_id: SeqId
    base_model: str
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None
    type: str = ""


class LoadWeights(Body):
    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: SeqId | None = None
    session_id: str | None = None
    model_seq_id: SeqId | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None
    type: str = ""


class ModelBody(Body):
    model_id: str
    type: str = ""


class Adam(Body):
    learning_rate: Annotated[Finite, Field(ge=0)] = 1e-4
    beta1: Annotated[Finite, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Finite, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[Finite, Field(ge=0)] = 1e-12
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[Finite, Field(ge=0)] = 0.0
    type: Literal["adam", "adamw"] = "adamw"


class OptimStep(Body):
    model_id: str
    adam_params: Adam = Field(validation_alias=AliasChoices("adam_params", "optimizer_params", "optim_params"))
    seq_id: SeqId | None = None
    type: str = ""


class SaveWeights(Body):
    model_id: str
    path: str | None = None
    seq_id: SeqId | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str = ""


class SaveForSampler(Body):
    model_id: str
    path: str | None = None
    sampling_session_seq_id: SeqId | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: SeqId | None = None
    ttl_seconds: Ttl | None = None
    user_metadata: dict[str, str] | None = None
    type: str = ""


class SaveExternal(Body):
    model_id: str
    path: str
    seq_id: SeqId | None = None
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: list[str] | None = None
    type: str = ""


class CreateSampler(Body):
    session_id: str
    sampling_session_seq_id: SeqId
    base_model: str | None = None
    model_path: str | None = None
    type: str = ""


class Sampling(Body):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Seed | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[Finite, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    type: str = ""


class Sample(Body):
    prompt: dict[str, Any]
    sampling_params: Sampling = Sampling()
    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    sampling_session_id: str | None = None
    seq_id: SeqId | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_K)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_K)] = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=MOST_TOP_K)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: bool | None = None  # for stable_reinforce alone, which is refused when it comes to that
    type: str = ""


class Retrieve(Loose):
    request_id: str
    allow_metadata_only: bool = False


class TinkerPath(Loose):
    tinker_path: str


class TtlBody(Body):
    ttl_seconds: Ttl | None = None


B = TypeVar("B", bound=BaseModel)


def read(kind: type[B], body: dict[str, Any]) -> B:
    """`body` as a `kind`. Raises `ApiError` that names the first key that is wrong, what it is and what it may be."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        if first["type"] == "extra_forbidden":
            known = ", ".join(kind.model_fields) if len(first["loc"]) == 1 else "see docs/tinker.md"
            raise ApiError(f"{where}: not known here ({known})") from error
        found = "" if first["type"] == "missing" else f", found {str(first['input'])[:200]!r}"
        raise ApiError(f"{where}: {first['msg']}{found}") from error


def digest_of(body: Any) -> str:
    """Equal for equal bodies."""
    return hashlib.blake2b(json.dumps(body.model_dump(), sort_keys=True).encode(), digest_size=16).hexdigest()
