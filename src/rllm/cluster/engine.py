"""verl's rollout servers as the engine of our gateway: tokens in, tokens out, with the newest policy.

verl's own OpenAI endpoints answer with the base model where LoRA is not merged; only ``LLMServerClient.generate`` names the adapter, so
every call of a flow goes this way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from rllm.backends.base import DEFAULT_ADAPTER, Completion, OnToken, SamplingParams
from rllm.gateway.errors import RequestError
from rllm.types import new_id


class ClientBackend:
    """`client` (verl's ``LLMServerClient``) with the members of a `Backend` that a gateway uses. Its calls are made in the event loop that
    `home` was given, whichever thread asks."""

    def __init__(self, client: Any, tokenizer: Any, model_name: str, max_model_len: int, end_ids: Collection[int]):
        self.client, self.tokenizer, self.model_name, self.max_model_len = client, tokenizer, model_name, max_model_len
        self.end_ids = frozenset(end_ids)
        self.home: asyncio.AbstractEventLoop | None = None
        self.policy_version = 0
        self.published_bytes = 0

    async def sample(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        adapter: str = DEFAULT_ADAPTER,
        on_token: OnToken | None = None,
    ) -> Completion:
        """One completion; see `Backend.sample`. Tokens are heard of when all are there: the servers do not stream."""
        if adapter != DEFAULT_ADAPTER:
            raise RequestError(f"adapter {adapter!r}: on verl there is one policy, {DEFAULT_ADAPTER!r}", "model")
        assert self.home is not None
        settings: dict[str, Any] = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "repetition_penalty": 1.0,
            "logprobs": True,
        }
        settings |= {"stop": list(params.stop)} if params.stop else {}
        settings |= {"stop_token_ids": list(params.stop_token_ids)} if params.stop_token_ids else {}
        settings |= {"ignore_eos": True} if params.ignore_eos else {}
        settings |= {"seed": params.seed % 2**31} if params.seed is not None else {}
        ask = self.client.generate(new_id(), prompt_ids=list(prompt_ids), sampling_params=settings)
        output = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask, self.home))
        return self._completion(output, params, on_token)

    def _completion(self, output: Any, params: SamplingParams, on_token: OnToken | None) -> Completion:
        ids, logprobs = list(output.token_ids), output.log_probs
        if output.stop_reason in ("aborted", "abort"):
            raise RuntimeError("the rollout server gave this call up (aborted)")
        if logprobs is None or len(logprobs) != len(ids):
            raise RuntimeError(
                f"the rollout server gave {len(ids)} tokens and {'no' if logprobs is None else len(logprobs)} log-probabilities"
            )
        if on_token is not None:
            for token, logprob in zip(ids, logprobs, strict=True):
                on_token(token, logprob)
        # The servers say "completed" of both ends; one that used up its tokens and ended in no stop token was cut.
        ended = bool(ids) and ids[-1] in (self.end_ids | set(params.stop_token_ids))
        version = output.extra_fields.get("global_steps")
        cut = len(ids) >= params.max_tokens and not ended
        return Completion(ids, list(logprobs), [int(version or 0)] * len(ids), "length" if cut else "stop")
