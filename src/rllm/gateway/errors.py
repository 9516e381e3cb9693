"""What the gateway refuses, in OpenAI's terms."""

from __future__ import annotations

from typing import Any

# The code of a call that took longer than it may.
CALL_TIMEOUT = "call_timeout"

# Messages quote what was sent, which may be of any size; their beginning and their end say what is wrong and what is allowed.
SHOWN_CHARACTERS = 1000


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": shortened(message), "type": kind, "param": param and param[:200], "code": code}}


def shortened(text: str) -> str:
    """`text`, or its beginning and its end where it is long."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} [...] {text[-half:]}"


class RequestError(Exception):
    """A request that cannot be served."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status
