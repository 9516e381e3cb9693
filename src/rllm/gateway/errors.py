"""What the gateway refuses, in OpenAI's terms."""

from __future__ import annotations

# The code of a call that took longer than it may.
CALL_TIMEOUT = "call_timeout"


class RequestError(Exception):
    """A request that cannot be served."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status
