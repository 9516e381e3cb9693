"""What every section of the config tree is built on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Strict: unknown keys are errors, numbers are finite, and true is not taken for 1."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("true and false have no meaning here")
        return value


def not_default(section: Section, default: Section) -> Iterator[str]:
    """Names of the fields of `section` that differ from `default`."""
    return (name for name in type(section).model_fields if getattr(section, name) != getattr(default, name))
