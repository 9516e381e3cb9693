"""What the server refuses, and how it says so."""

from __future__ import annotations

from typing import Literal

Category = Literal["user", "server"]


class ApiError(Exception):
    """A request that cannot be served, as an HTTP status and a message. Clients try 408, 409, 429 and 5xx again, the others not.
    `request`: the run it was for and its number, where the message alone could be read."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status
        self.request: tuple[str, int | None] | None = None

    @property
    def final(self) -> bool:
        """Whether the same request will not come again."""
        return self.status not in (408, 409, 429) and self.status < 500


class OperationError(Exception):
    """An operation that was accepted and then could not be done: the result of its future. The caller's fault."""
