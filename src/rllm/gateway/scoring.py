"""What a model says of the prompt itself: ``echo`` with ``logprobs`` as OpenAI's completions route had it, and vLLM's ``prompt_logprobs``.

Knows request words and answer shapes; nothing of HTTP or models. Log-probabilities of a prompt are those without temperature, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.backends.base import Scored
from rllm.gateway.errors import RequestError
from rllm.gateway.requests import flag

# Only the likeliest token beside the given one is kept.
MOST_ALTERNATIVES = 1
TokenTexts = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class ScoreForm:
    """What is asked about the prompt. `echo`: the text begins with it. `logprobs`, `prompt_logprobs`: how many alternatives to each
    of its tokens are told in either form; None: not asked. `generate` False: nothing is sampled."""

    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    generate: bool

    @property
    def scores(self) -> bool:
        return self.logprobs is not None or self.prompt_logprobs is not None


def score_form(body: Mapping[str, Any]) -> tuple[ScoreForm | None, dict[str, Any]]:
    """(what is asked about the prompt, or None; the rest of the request, as if nothing were)."""
    echo, prompt_logprobs = flag(body, "echo"), _count(body, "prompt_logprobs", False)
    if not echo and prompt_logprobs is None:
        return None, dict(body)
    if flag(body, "stream"):
        name = "echo" if echo else "prompt_logprobs"
        raise RequestError(f"{name} cannot be streamed; leave stream out", name, "unsupported_parameter")
    rest = {name: value for name, value in body.items() if name not in ("echo", "prompt_logprobs")}
    generate = not (type(body.get("max_tokens")) is int and body["max_tokens"] == 0)
    if not generate:
        del rest["max_tokens"]
    logprobs = _count(body, "logprobs", True) if echo else None
    if logprobs is not None:
        rest["logprobs"] = True
    return ScoreForm(echo, logprobs, prompt_logprobs, generate), rest


def _count(body: Mapping[str, Any], name: str, truth: bool) -> int | None:
    """0 or 1; with `truth` also true (0) and false (None)."""
    value = body.get(name)
    if truth and isinstance(value, bool):
        return 0 if value else None
    if value is None or (type(value) is int and 0 <= value <= MOST_ALTERNATIVES):
        return value
    raise RequestError(
        f"{name} must be 0 or 1 (alternatives to each token of the prompt)", name, "unsupported_parameter"
    )


def with_prompt(
    answer: dict[str, Any], form: ScoreForm, text: str, ids: Sequence[int], scored: Scored | None, texts: TokenTexts
) -> dict[str, Any]:
    """A whole answer of the completions route, with what was asked about the prompt in each of its choices."""
    for choice in answer["choices"]:
        if form.echo:
            choice["text"] = text + choice["text"]
        if form.logprobs is not None:
            assert scored is not None
            choice["logprobs"] = _echoed(choice["logprobs"], form.logprobs, ids, scored, texts)
        if form.prompt_logprobs is not None:
            assert scored is not None
            choice["prompt_logprobs"] = _by_id(form.prompt_logprobs, ids, scored, texts)
    return answer


def _echoed(
    sampled: Mapping[str, Any] | None, alternatives: int, ids: Sequence[int], scored: Scored, texts: TokenTexts
) -> dict[str, Any]:
    """Lists over prompt and completion. There is nothing to say of the first token; of sampled ones no alternatives are kept."""
    after: Mapping[str, Any] = sampled or {"tokens": [], "token_logprobs": []}
    tokens, bests = texts(ids), texts(scored.best_ids) if alternatives else []
    top: list[dict[str, float] | None] = [None]
    for token, logprob, best, best_logprob in zip(
        tokens[1:], scored.logprobs, bests, scored.best_logprobs, strict=bool(alternatives)
    ):
        top.append({best: best_logprob} | {token: logprob})
    return {
        "tokens": [*tokens, *after["tokens"]],
        "token_logprobs": [None, *scored.logprobs, *after["token_logprobs"]],
        "top_logprobs": [*top, *[None] * len(after["tokens"])] if alternatives else None,
        "text_offset": None,
    }


def _by_id(alternatives: int, ids: Sequence[int], scored: Scored, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token but the first, a mapping from token id to log-probability, rank and text."""
    result: list[dict[str, Any] | None] = [None]
    told, bests = texts(ids), texts(scored.best_ids)
    for t, (token, logprob, rank) in enumerate(zip(ids[1:], scored.logprobs, scored.ranks, strict=True)):
        entry = {str(token): {"logprob": logprob, "rank": rank, "decoded_token": told[t + 1]}}
        if alternatives and rank > 1:
            best = {"logprob": scored.best_logprobs[t], "rank": 1, "decoded_token": bests[t]}
            entry[str(scored.best_ids[t])] = best
        result.append(entry)
    return result
