"""Samplers and what they are asked: checked here, done by `sampling.py`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rllm.backends.base import SamplingParams
from rllm.serve.tinker import bodies
from rllm.serve.tinker.bodies import digest_of
from rllm.serve.tinker.errors import ApiError
from rllm.serve.tinker.futures import PendingResult
from rllm.serve.tinker.sampling import PromptQuery
from rllm.serve.tinker.wire import SparseTensor, tensor_of_json, tokens_of_json

if TYPE_CHECKING:
    from rllm.serve.tinker.service import TinkerService


class Samplers:
    """The sampling half of `TinkerService`."""

    def __init__(self, service: TinkerService):
        self.service = service
        self.last_used: dict[str, float] = {}

    def create(self, body: bodies.CreateSampler) -> str:
        """The id of a sampler of a checkpoint or of the base."""
        self.service.open_session(body.session_id)
        if body.model_path is not None:
            self.service.of_this_base(body.model_path)
        elif body.base_model is not None:
            self.service.check_base(body.base_model)
        else:
            raise ApiError("model_path or base_model must say what to sample from")
        sampler = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        self.service.store.add_sampler(sampler, body.session_id, body.model_path)
        return sampler

    def sample(self, body: bodies.Sample) -> PendingResult:
        """Raises `ApiError` for what cannot be sampled, 429 when too much waits."""
        if body.sampling_session_id is not None:
            found = self.service.store.sampler(body.sampling_session_id)
            if found is None:
                raise ApiError(f"there is no sampling session {body.sampling_session_id[:200]!r}", 404)
            tenant, path = found
        else:
            tenant, path = "", body.model_path
            if path is None:
                self.service.check_base(body.base_model or "")
        key = (body.sampling_session_id, body.seq_id) if None not in (body.sampling_session_id, body.seq_id) else None
        digest = digest_of(body) if key is not None else ""
        if key is not None and (known := self.service.futures.known(key, digest)):
            return known
        if path is not None:
            self.service.of_this_base(path)
            self.last_used[path] = time.monotonic()
        prompt = tuple(tokens_of_json(body.prompt, "prompt"))
        params, query = self._params(body, len(prompt)), self._prompt_query(body, len(prompt))
        vocab, longest = self.service.backend.model.config.vocab_size, self.service.backend.max_model_len
        if not 1 <= len(prompt) < longest:
            raise ApiError(
                f"prompt: {len(prompt)} tokens; it must leave room for one more in the model length of {longest} "
                "(--set model.max_model_len=...), and be not empty"
            )
        if max(prompt) >= vocab:
            raise ApiError(f"prompt: token {max(prompt)} is outside of the vocabulary of {vocab}")
        self.service.sampler.slots.check_room(body.num_samples)
        future = self.service.futures.create(key, digest)
        future.told["sample_sequence_ids"] = [f"{future.id}-{i}" for i in range(body.num_samples)]
        self.service.follow(future, self.service.sampler.sample(tenant, path, prompt, params, body.num_samples, query))
        return future

    def _params(self, body: bodies.Sample, length: int) -> SamplingParams:
        given, room = body.sampling_params, self.service.backend.max_model_len - length
        stop = [given.stop] if isinstance(given.stop, str) else given.stop
        if "" in (stop or []):
            raise ApiError("sampling_params.stop: a stop string is empty; leave it out")
        return SamplingParams(
            max_tokens=min(given.max_tokens or room, max(room, 1)),
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(given.top_k, 0),
            seed=None if given.seed is None else given.seed % 2**63,
            stop=tuple(text for text in stop or () if isinstance(text, str)),
            stop_token_ids=tuple(token for token in stop or () if isinstance(token, int)),
            ignore_eos=stop == [],
        )

    def _prompt_query(self, body: bodies.Sample, length: int) -> PromptQuery:
        if body.prompt_logprobs_last_n is not None and not (
            body.prompt_logprobs and body.prompt_logprobs_last_n < length
        ):
            raise ApiError(
                f"prompt_logprobs_last_n: {body.prompt_logprobs_last_n}; it needs prompt_logprobs and must be below the {length} tokens "
                "of the prompt"
            )
        targets = None
        if body.target_prompt_logprobs is not None:
            targets = tensor_of_json(body.target_prompt_logprobs, "target_prompt_logprobs")
            cells = targets.values if isinstance(targets, SparseTensor) else targets
            vocab = self.service.backend.model.config.vocab_size
            if len(targets.shape) != 2 or targets.shape[0] != length - 1 or cells.dtype.kind != "i":
                raise ApiError(
                    f"target_prompt_logprobs: shape {list(targets.shape)}; expected int64 [{length - 1}, K], a row for each token but the first"
                )
            if cells.size and (cells.min() < -1 or cells.max() >= vocab):
                raise ApiError(f"target_prompt_logprobs: ids must be -1 (none) or inside of the vocabulary of {vocab}")
        return PromptQuery(
            logprobs=bool(body.prompt_logprobs),
            top_k=body.topk_prompt_logprobs,
            last=body.prompt_logprobs_last_n,
            targets=targets,
            draws=body.prompt_alt_tokens_k,
            sample_top_k=body.topk_sample_logprobs,
        )
