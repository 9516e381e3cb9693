"""Who says how likely the student's tokens are: a model that the backend holds, or an OpenAI endpoint that tells log-probabilities of
given tokens.

Knows rows and HTTP; nothing of advantages or episodes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from rllm.backends.base import TEACHER, Backend, Datum
from rllm.config.schema import Config
from rllm.errors import ConfigError, RunError
from rllm.gateway.endpoint import ATTEMPTS, TRANSIENT, Spelling, key_header, served_model, wait_of

KEYS = Spelling("distill.base_url=", "distill.model=", "distill.api_key_env=")
# vLLM writes this for -inf, which JSON does not have.
MINUS_INFINITY = -9999.0
# A logarithm of a probability may be above 0 by this much.
ROUNDING = 0.01
# Tokens of which an endpoint is asked at the start how it writes them.
PROBE_TOKENS = 64


@dataclass(frozen=True)
class Unscored:
    """A row that the teacher did not score: why, in one word for the counts, and in full."""

    reason: str
    detail: str


class Teacher(Protocol):
    """`name` is for people."""

    name: str

    def logprobs(self, rows: Sequence[Datum]) -> list[list[float] | Unscored]:
        """Log-probability of every trained token of every row at the row's temperature; entries where the mask is 0 have no meaning."""
        ...


def make_teacher(config: Config, backend: Backend) -> Teacher:
    """The teacher that ``distill`` names, tried once. Raises `UserError` where it cannot teach."""
    d = config.distill
    if d.base_url is not None:
        return EndpointTeacher(config, backend.tokenizer, backend.max_model_len)
    try:
        backend.logprobs([Datum([0, 0], [0, 1])], TEACHER, trained_only=True)
    except KeyError as error:
        raise ConfigError("distill.teacher: the given backend was made without it; make it with this config") from error
    return BackendTeacher(backend, d.teacher or config.model.path, d.adapter)


class BackendTeacher:
    """A model that the backend holds beside the student."""

    def __init__(self, backend: Backend, model: str, adapter: str | None):
        self._backend = backend
        self.name = model + (f" with the adapter {adapter}" if adapter else "")

    def logprobs(self, rows: Sequence[Datum]) -> list[list[float] | Unscored]:
        return [*self._backend.logprobs(rows, TEACHER, trained_only=True)]


class EndpointTeacher:
    """A model behind the completions route at ``distill.base_url``, asked with ``prompt`` as token ids, ``echo`` and ``logprobs``.

    Its log-probabilities are those without temperature. The endpoint is asked about some tokens of the whole vocabulary at once: it
    must answer, tell log-probabilities and write each token as the student's tokenizer does, else a `RunError` says what it did.
    """

    def __init__(self, config: Config, tokenizer: Any, longest: int):
        d = config.distill
        assert d.base_url is not None
        self.base_url, self.timeout_s, self.max_concurrency = d.base_url.rstrip("/"), d.timeout_s, d.max_concurrency
        self._headers = key_header(os.environ.get(d.api_key_env) if d.api_key_env else None)
        self.model = served_model(self.base_url, self._headers, d.model, KEYS)
        self.name = f"{self.model} at {self.base_url}"
        self._max_tokens, self._down = 0, False
        self._probe(tokenizer, longest)

    def logprobs(self, rows: Sequence[Datum]) -> list[list[float] | Unscored]:
        async def all_rows() -> list[list[float] | Unscored]:
            free = asyncio.Semaphore(self.max_concurrency)
            async with self._client() as client, asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._row(client, free, row)) for row in rows]
            return [task.result() for task in tasks]

        self._down = False
        return asyncio.run(all_rows())

    async def _row(self, client: httpx.AsyncClient, free: asyncio.Semaphore, row: Datum) -> list[float] | Unscored:
        if row.temperature != 1.0:
            return Unscored(
                "teacher_temperature",
                f"a call was sampled at temperature {row.temperature:g}, and an endpoint tells log-probabilities without temperature: "
                "sample at 1, or use distill.teacher",
            )
        async with free:
            try:
                return _logprobs_in(await self._asked(client, row.ids), row.ids)
            except _Failed as error:
                return Unscored(error.reason, f"{self.base_url}: {error}")

    async def _asked(self, client: httpx.AsyncClient, ids: Sequence[int]) -> Any:
        """The endpoint's choice for a prompt, within the deadline."""
        met: list[str] = []
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._with_retries(client, ids, met)
        except TimeoutError as error:
            last = f"; before that: {met[-1]}" if met else ""
            raise _Failed(
                "teacher_timeout", f"no answer within {self.timeout_s:g} s (distill.timeout_s){last}"
            ) from error

    async def _with_retries(self, client: httpx.AsyncClient, ids: Sequence[int], met: list[str]) -> Any:
        """`met` gets what each attempt failed with."""
        body = {
            "model": self.model,
            "prompt": list(ids),
            "echo": True,
            "max_tokens": self._max_tokens,
            "logprobs": 1,
            "temperature": 1.0,
        }
        attempt = 0
        while True:
            last = self._down or attempt == ATTEMPTS - 1
            answer = None
            try:
                answer = await client.post(f"{self.base_url}/completions", json=body)
            except httpx.HTTPError as error:
                if last:
                    self._down = True  # the others need not wait for it as long
                    raise _Failed("teacher_unreachable", f"{type(error).__name__}: {error}") from error
                met.append(f"{type(error).__name__}: {error}")
            if answer is not None and (last or answer.status_code not in TRANSIENT):
                return _choice_of(answer)
            if answer is not None:
                met.append(f"status {answer.status_code}")
            await asyncio.sleep(wait_of(attempt, answer))
            attempt += 1

    def _probe(self, tokenizer: Any, longest: int) -> None:
        ids = _spread(tokenizer, min(PROBE_TOKENS, longest - 1))

        async def ask() -> Any:
            async with self._client() as client:
                return await self._asked(client, ids)

        try:
            try:
                choice = asyncio.run(ask())
            except _Failed as error:
                if error.status not in (400, 422):
                    raise
                self._max_tokens = 1  # some servers must sample something
                choice = asyncio.run(ask())
            _logprobs_in(choice, ids)
        except _Failed as error:
            raise RunError(
                f"{KEYS.base_url}{self.base_url}: it cannot teach: {error}. Needed is a completions route that takes token ids as prompt "
                "and answers echo=true with logprobs, such as vLLM's or that of rllm serve"
            ) from error
        for token, theirs in zip(ids, _texts_in(choice), strict=False):
            ours = tokenizer.decode([token])
            if _differ(token, ours, theirs):
                raise RunError(
                    f"{KEYS.base_url}{self.base_url}: {self.model} has another tokenizer than model.path: token {token} is {theirs!r} "
                    f"there and {ours!r} here; the teacher must share the student's tokenizer"
                )

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=self._headers, timeout=None, limits=httpx.Limits(max_connections=self.max_concurrency)
        )


class _Failed(Exception):
    def __init__(self, reason: str, message: str, status: int = 0):
        super().__init__(message)
        self.reason, self.status = reason, status


def _choice_of(answer: httpx.Response) -> Any:
    try:
        data = answer.json()
    except (ValueError, RecursionError):
        data = None
    if answer.status_code != 200:
        error = data.get("error") if isinstance(data, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        text = str(message or (data if data is not None else answer.text))[:300]
        raise _Failed("teacher_error", f"status {answer.status_code}: {text}", answer.status_code)
    try:
        choice = data["choices"][0]  # pyright: ignore[reportOptionalSubscript] - that is what is tried
        assert isinstance(choice, dict)
    except (AssertionError, IndexError, KeyError, TypeError) as error:
        raise _Failed("teacher_error", f"the answer is no completion: {answer.text[:200]}") from error
    return choice


def _logprobs_in(choice: dict[str, Any], ids: Sequence[int]) -> list[float]:
    """Log-probability of each of `ids`, 0 for the first: from vLLM's ``prompt_logprobs``, which names the tokens, or from the lists of
    an echo."""
    told = choice.get("prompt_logprobs")
    if isinstance(told, list):
        entries = [entry if isinstance(entry, dict) else {} for entry in told]
        values = [entry.get(str(token)) for entry, token in zip(entries, ids, strict=False)]
        values = [value.get("logprob") if isinstance(value, dict) else None for value in values]
        found = len(told)
    else:
        lists = choice.get("logprobs")
        values = lists.get("token_logprobs") if isinstance(lists, dict) else None
        if not isinstance(values, list) or not any(value is not None for value in values):
            raise _Failed("teacher_no_logprobs", "the answer has no log-probabilities of the prompt")
        found = len(values)
    if not len(ids) <= found <= len(ids) + 1:
        raise _Failed("teacher_length", f"it tells {found} log-probabilities for {len(ids)} tokens")
    result = [0.0]
    for value in values[1 : len(ids)]:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise _Failed("teacher_no_logprobs", "the answer lacks the log-probability of a token of the prompt")
        if value > ROUNDING:
            raise _Failed("teacher_error", f"{str(value)[:20]} is no log-probability: it is above 0")
        result.append(float("-inf") if value <= MINUS_INFINITY else float(value))
    return result


def _texts_in(choice: dict[str, Any]) -> list[Any]:
    lists = choice.get("logprobs")
    return list(lists.get("tokens") or ()) if isinstance(lists, dict) else []


def _spread(tokenizer: Any, n: int) -> list[int]:
    """`n` token ids, or as many as there are, evenly over the vocabulary to its end."""
    last = len(tokenizer) - 1
    return sorted({round(i * last / max(n - 1, 1)) for i in range(n)})


def _differ(token: int, ours: str, theirs: Any) -> bool:
    """Whether a token is certainly another one there. How bytes that are no characters are written differs between servers."""
    if not isinstance(theirs, str):
        return False
    if theirs.startswith("token_id:"):
        return theirs != f"token_id:{token}"
    plain = all(text.isascii() and text.isprintable() for text in (ours.strip(), theirs.strip()))
    return plain and ours.strip() != theirs.strip()
