"""Somebody else's OpenAI endpoint: which model it serves, and what of its failures may pass by itself.

Knows HTTP; nothing of sessions or models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from rllm.errors import UserError

# What may pass by itself: too many requests, and servers that are not there for a moment.
TRANSIENT = (408, 429, 500, 502, 503, 504)
ATTEMPTS = 4
MOST_WAIT_S = 30.0
CHECK_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Spelling:
    """What the settings of an endpoint are called where the user gave them, each ending in what stands before its value."""

    base_url: str = "--base-url "
    model: str = "--model "
    api_key_env: str = "--api-key-env "


def key_header(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def wait_of(attempt: int, answer: httpx.Response | None) -> float:
    """Seconds to wait after try number `attempt` (from 0): as long as the endpoint asks for, else 1, 2, 4, ..."""
    wait = 2.0**attempt
    if answer is not None:
        with contextlib.suppress(ValueError):
            wait = float(answer.headers.get("retry-after", wait))
    return min(wait, MOST_WAIT_S)


def served_model(base_url: str, headers: Mapping[str, str], model: str | None, keys: Spelling | None = None) -> str:
    """`model`, or the first that the endpoint lists, after it was asked for its list once. Raises `UserError`."""
    keys = keys or Spelling()
    where = f"{keys.base_url}{base_url}"
    try:
        answer = httpx.get(f"{base_url}/models", headers=dict(headers), timeout=CHECK_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"{where}: nothing answers there ({type(error).__name__}: {error}); give the URL up to and with /v1 of a server that runs"
        ) from error
    if answer.status_code in (401, 403):
        raise UserError(
            f"{where}: the endpoint refuses the API key (status {answer.status_code}); name the environment variable that holds it "
            f"with {keys.api_key_env.strip(' =')}"
        )
    try:
        names = [str(entry["id"]) for entry in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        names = []
    if answer.status_code == 404 and not base_url.endswith("/v1"):
        raise UserError(f"{where}: it answers 404 for {base_url}/models; give the URL up to and with /v1")
    if model is None and not names:
        raise UserError(f"{where}: it lists no models (status {answer.status_code}); give {keys.model}NAME")
    if model is not None and names and model not in names:
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise UserError(f"{keys.model}{model!r}: {base_url} serves {shown}")
    return model or names[0]
