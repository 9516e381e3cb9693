"""The `tinker` section of the config tree: where the service is and how it is used (``backend=tinker``)."""

from __future__ import annotations

from pydantic import Field, field_validator

from rllm.config.section import Section


class TinkerConfig(Section):
    """A client of Tinker's API; see docs/tinker.md."""

    base_url: str | None = Field(
        default=None,
        description="Server, e.g. http://127.0.0.1:8000 of rllm serve; default: the environment variable TINKER_BASE_URL, else the "
        "hosted service",
    )
    api_key_env: str = Field(default="TINKER_API_KEY", description="Environment variable with the API key")
    project: str | None = Field(
        default=None, description="Id of the hosted service's project that the session belongs to"
    )
    tokenizer: str | None = Field(
        default=None,
        description="Folder or hub id of the tokenizer; default: the one that the server names, or model.path",
    )
    ttl_seconds: int | None = Field(
        default=None,
        ge=3600,
        le=315_360_000,
        description="After so long the server deletes the states to resume from (default: never)",
    )
    patience_s: float = Field(
        default=60.0, ge=5, description="A server that does not answer for so long during a run ends it"
    )

    @field_validator("base_url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("http://", "https://")):
            raise ValueError("it must begin with http:// or https://")
        if value.rstrip("/").endswith("/v1"):
            raise ValueError("it is the address of the server itself, without /v1 or /api/v1")
        return value.rstrip("/")
