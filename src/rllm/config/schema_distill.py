"""The `distill` section of the config tree: a teacher, and what becomes of what it says."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from rllm.config.section import Fraction, Section


class DistillConfig(Section):
    """On-policy distillation; see `rllm.algorithms.distillation`."""

    teacher: str | None = Field(
        default=None,
        description="Model that teaches: folder, hub id or `default`, with the student's tokenizer; the weights of model.path are shared",
    )
    adapter: str | None = Field(
        default=None, description="PEFT LoRA folder on the teacher; without distill.teacher, on model.path"
    )
    base_url: str | None = Field(
        default=None,
        description="Teacher behind an OpenAI endpoint that tells log-probabilities of given tokens (vLLM, rllm serve), e.g. "
        "http://127.0.0.1:8000/v1",
    )
    model: str | None = Field(
        default=None, description="The endpoint's name of the teacher; default: the first it lists"
    )
    api_key_env: str | None = Field(default=None, description="Environment variable with the endpoint's API key")
    mode: Literal["only", "add"] = Field(
        default="only",
        description="The teacher's advantages take the place of the rewards' | are added to them",
    )
    coef: float = Field(default=1.0, gt=0, description="Weight of the teacher's advantages")
    gamma: Fraction = Field(
        default=0.0, description="Discount of what the teacher says of later tokens of a row (0: each token by itself)"
    )
    roles: list[str] | None = Field(default=None, description="Roles that are taught; default: all")
    timeout_s: float = Field(
        default=120.0, gt=0, description="Deadline of the endpoint for one row, waiting and retries included"
    )
    max_concurrency: int = Field(default=16, gt=0, description="Most rows that the endpoint is asked about at once")

    @field_validator("base_url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("it must begin with http:// or https://")
        return value

    @field_validator("roles")
    @classmethod
    def _some_role(cls, value: list[str] | None) -> list[str] | None:
        if value == []:
            raise ValueError("an empty list teaches nobody; leave it out for all roles")
        return value

    @property
    def local(self) -> bool:
        """Whether a model of this process teaches."""
        return self.teacher is not None or self.adapter is not None

    @property
    def enabled(self) -> bool:
        return self.local or self.base_url is not None

    def teaches(self, role: str) -> bool:
        """Whether trajectories of `role` are scored by the teacher."""
        return self.enabled and (self.roles is None or role in self.roles)

    @property
    def replaces_all(self) -> bool:
        """Whether no reward is trained on at all."""
        return self.enabled and self.mode == "only" and self.roles is None
