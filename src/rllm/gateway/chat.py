"""From messages to exact prompt tokens, a sampled answer and its record. HTTP and workflows both go through here.

Knows the tokenizer and the backend's `sample`; nothing of HTTP.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rllm.backends.base import Backend, SamplingParams
from rllm.gateway.recorder import Call, Session
from rllm.types import Message, ModelOutput, new_id

RENDER_CACHE_SIZE = 1024


class RequestError(Exception):
    """A request that cannot be served, in OpenAI's terms."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class CallParams:
    """Sampling settings of one call; None means "the session's, else the default"."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


class ChatModel:
    """A backend behind messages. `max_prompt_length` in tokens."""

    def __init__(self, backend: Backend, max_prompt_length: int | None = None, default_max_tokens: int = 512):
        self.backend = backend
        self.max_prompt_length = min(max_prompt_length or backend.max_model_len, backend.max_model_len - 1)
        self.default_max_tokens = default_max_tokens
        self._rendered: OrderedDict[str, list[int]] = OrderedDict()
        special = getattr(backend.tokenizer, "all_special_tokens", None) or []
        self._markers = tuple(special)

    async def chat(
        self,
        messages: list[Message],
        params: CallParams,
        session: Session | None = None,
        trajectory: str | None = None,
        call_id: str | None = None,
        adapter: str | None = None,
    ) -> ModelOutput:
        """Answer a chat. With a session the call is recorded there, under `call_id` or a fresh one."""
        prompt_ids = self.prompt_ids(messages, session, trajectory)
        return await self.complete(prompt_ids, params, session, trajectory, call_id, adapter, messages)

    async def complete(
        self,
        prompt_ids: list[int],
        params: CallParams,
        session: Session | None = None,
        trajectory: str | None = None,
        call_id: str | None = None,
        adapter: str | None = None,
        messages: list[Message] | None = None,
    ) -> ModelOutput:
        """Continue a prompt of token ids, and record it."""
        if len(prompt_ids) > self.max_prompt_length:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens; at most {self.max_prompt_length} are allowed "
                "(data.max_prompt_length and the model's length)",
                "messages",
                "context_length_exceeded",
            )
        sampling = self._sampling(params, prompt_ids, session, trajectory)
        name = adapter or (session.adapter if session else "default")
        completion = await self.backend.sample(prompt_ids, sampling, name)
        text = self.backend.tokenizer.decode(completion.ids, skip_special_tokens=True)
        output = ModelOutput(
            id=call_id or f"chatcmpl-{new_id()}",
            text=text,
            content=text,
            prompt_ids=prompt_ids,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            temperature=sampling.temperature,
        )
        if session is not None:
            session.record(Call(output, messages or [], trajectory))
        return output

    def prompt_ids(self, messages: list[Message], session: Session | None, trajectory: str | None) -> list[int]:
        """Tokens of a chat that ends with the assistant's turn to speak.

        Where the chat extends a recorded call, its exact tokens are taken and only what is new is rendered, provided the template
        leaves the earlier part as it was; else the whole chat is rendered anew.
        """
        for message in messages:
            self._refuse_markers(message)
        earlier = session.longest_extended(messages, trajectory) if session else None
        if earlier is not None:
            extended = self._extend(earlier, messages)
            if extended is not None:
                return extended
        key = json.dumps(messages, ensure_ascii=False, sort_keys=True)
        ids = self._rendered.get(key)
        if ids is None:
            ids = self._render_ids(messages)
            self._rendered[key] = ids
            if len(self._rendered) > RENDER_CACHE_SIZE:
                self._rendered.popitem(last=False)
        return list(ids)

    def _extend(self, earlier: Call, messages: list[Message]) -> list[int] | None:
        tokenizer = self.backend.tokenizer
        answered = messages[: len(earlier.messages) + 1]
        before, after = self._render(answered, False), self._render(messages, True)
        prefix = self._render(earlier.messages, True) + earlier.output.text
        if not before.startswith(prefix) or not after.startswith(before):
            return None
        known = earlier.output.prompt_ids + earlier.output.completion_ids
        rest = after[len(prefix) :]
        if earlier.output.finish_reason == "stop" and known:
            end = tokenizer.decode([known[-1]], skip_special_tokens=False)
            if not rest.startswith(end):
                return None
            rest = rest[len(end) :]
        return known + tokenizer(rest, add_special_tokens=False)["input_ids"]

    def _render(self, messages: Sequence[Message], generation: bool) -> str:
        return self.backend.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation
        )

    def _render_ids(self, messages: list[Message]) -> list[int]:
        try:
            text = self._render(messages, True)
        except Exception as error:  # templates raise what they like
            raise RequestError(f"the chat template cannot render these messages: {error}", "messages") from error
        return self.backend.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _refuse_markers(self, message: Message) -> None:
        content = message.get("content") or ""
        marker = next((marker for marker in self._markers if marker in content), None)
        if marker is not None:
            raise RequestError(
                f"a message holds the chat marker {marker!r}, which would be read as structure; remove it", "messages"
            )

    def _sampling(
        self, params: CallParams, prompt_ids: list[int], session: Session | None, trajectory: str | None
    ) -> SamplingParams:
        defaults = session.sampling if session else {}

        def pick(name: str, value: Any, fallback: Any) -> Any:
            return value if value is not None else defaults.get(name) if defaults.get(name) is not None else fallback

        top_p, top_k = pick("top_p", params.top_p, 1.0), pick("top_k", params.top_k, 0)
        temperature = pick("temperature", params.temperature, 1.0)
        if session is not None and not session.is_validation:
            for name, value, off in (("top_p", top_p, 1.0), ("top_k", top_k, 0)):
                if value != off:
                    raise RequestError(
                        f"{name}={value} in training: the log-probabilities trained on would not be those sampled from; "
                        f"leave it at {off:g}",
                        name,
                    )
            if temperature == 0:
                raise RequestError(
                    "temperature=0 in training: greedy samples have no gradient; use one above 0", "temperature"
                )
        seed = params.seed
        if seed is None and session is not None:
            seed = session.next_seed(tuple(prompt_ids), trajectory)
        wanted = pick("max_tokens", params.max_tokens, self.default_max_tokens)
        return SamplingParams(
            max_tokens=max(1, min(wanted, self.backend.max_model_len - len(prompt_ids))),
            temperature=float(temperature),
            top_p=float(top_p),
            top_k=int(top_k),
            seed=seed,
            stop=params.stop,
        )


class SessionEngine:
    """The model as a workflow sees it: in process, recorded in its session."""

    def __init__(self, model: ChatModel, session: Session):
        self._model, self.session = model, session

    async def get_model_response(self, messages: list[Message], **sampling: Any) -> ModelOutput:
        """One answer. Keywords: max_tokens, temperature, top_p, seed, stop, trajectory (a uid the call belongs to)."""
        trajectory = sampling.pop("trajectory", None)
        stop = sampling.pop("stop", ())
        params = CallParams(**sampling, stop=(stop,) if isinstance(stop, str) else tuple(stop))
        return await self._model.chat(messages, params, self.session, trajectory)
