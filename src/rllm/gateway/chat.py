"""From messages to exact prompt tokens, a sampled answer and its record. HTTP and workflows both go through here.

Knows the tokenizer and the backend's `sample`; nothing of HTTP.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from rllm.backends.base import DEFAULT_ADAPTER, Backend, SamplingParams
from rllm.gateway.recorder import Call, Session
from rllm.gateway.requests import CallParams, RequestError, plain_messages, sampling_keywords
from rllm.types import Message, ModelOutput, TerminationEvent, TerminationReason, new_id

RENDER_CACHE_SIZE = 1024
TOO_LONG = "context_length_exceeded"
# A Unicode noncharacter put inside a chat marker that stands in a message: the text is tokenized in pieces cut here, so no
# message can write the token that ends a turn.
_CUT = "\ufdd0"


class ChatModel:
    """A backend behind messages. `max_prompt_length` in tokens. Safe to use from several threads."""

    def __init__(self, backend: Backend, max_prompt_length: int | None = None, default_max_tokens: int = 512):
        self.backend = backend
        self.max_prompt_length = min(max_prompt_length or backend.max_model_len, backend.max_model_len - 1)
        self.default_max_tokens = default_max_tokens
        self._rendered: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._markers = _special_tokens(backend.tokenizer)

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
        """Continue a prompt of token ids, and record it. `text` is all that was sampled, `content` ends before a stop text."""
        if len(prompt_ids) > self.max_prompt_length:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens; at most {self.max_prompt_length} are allowed "
                "(data.max_prompt_length and the model's length)",
                "prompt" if messages is None else "messages",
                TOO_LONG,
            )
        order = session.next_order() if session else 0
        sampling = self._sampling(params, prompt_ids, session, trajectory)
        name = adapter or (session.adapter_of(None) if session else DEFAULT_ADAPTER)
        completion = await self.backend.sample(prompt_ids, sampling, name)
        text = self.backend.tokenizer.decode(completion.ids, skip_special_tokens=True)
        output = ModelOutput(
            id=call_id or f"chatcmpl-{new_id()}",
            text=text,
            content=_before_stop(text, params.stop) if completion.finish_reason == "stop" else text,
            prompt_ids=prompt_ids,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            temperature=sampling.temperature,
            adapter=name,
        )
        if session is not None:
            session.record(Call(output, messages or [], trajectory, order))
        return output

    def prompt_ids(self, messages: list[Message], session: Session | None, trajectory: str | None) -> list[int]:
        """Tokens of a chat that ends with the assistant's turn to speak.

        Where the chat extends a recorded call, its exact tokens are taken and only what is new is rendered, provided the template
        leaves the earlier part as it was; else the whole chat is rendered anew.
        """
        earlier = session.longest_extended(messages, trajectory) if session and len(messages) > 1 else None
        extended = self._extend(earlier, messages) if earlier is not None else None
        if extended is not None:
            return extended
        key = json.dumps(messages, ensure_ascii=False)
        with self._lock:
            ids = self._rendered.get(key)
            if ids is not None:
                self._rendered.move_to_end(key)
        if ids is None:
            ids = self._encode(self._render(messages, generation=True))
            with self._lock:
                self._rendered[key] = ids
                if len(self._rendered) > RENDER_CACHE_SIZE:
                    self._rendered.popitem(last=False)
        return list(ids)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token as text of its own."""
        return [self.backend.tokenizer.decode([token]) for token in ids]

    def tokenize(self, text: str) -> list[int]:
        """A raw prompt: special tokens in it are meant."""
        return self.backend.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _extend(self, earlier: Call, messages: list[Message]) -> list[int] | None:
        """Recorded tokens of `earlier` + the tokens of what follows; None where the template writes the earlier part otherwise."""
        answered = messages[: len(earlier.messages) + 1]
        before, after = self._render(answered, generation=False), self._render(messages, generation=True)
        spoken = self._render(earlier.messages, generation=True) + self._guard(earlier.output.text)
        if not before.startswith(spoken) or not after.startswith(before):
            return None
        rest = after[len(spoken) :]
        ended_by = self.backend.tokenizer.decode(earlier.output.completion_ids[-1:], skip_special_tokens=False)
        if ended_by in self._markers:  # the end of turn was sampled; the template writes it too
            if not rest.startswith(ended_by):
                return None
            rest = rest[len(ended_by) :]
        return earlier.output.prompt_ids + earlier.output.completion_ids + self._encode(rest)

    def _render(self, messages: Sequence[Message], *, generation: bool) -> str:
        """The chat as the template writes it, with markers inside the messages cut."""
        guarded = [{**message, "content": self._guard(message["content"])} for message in messages]
        try:
            return self.backend.tokenizer.apply_chat_template(guarded, tokenize=False, add_generation_prompt=generation)
        except Exception as error:  # templates raise what they like
            raise RequestError(f"the chat template cannot render these messages: {error}", "messages") from error

    def _guard(self, content: str) -> str:
        for marker in self._markers:
            if marker in content:
                content = content.replace(marker, marker[0] + _CUT + marker[1:])
        return content

    def _encode(self, text: str) -> list[int]:
        if _CUT not in text:
            return self.tokenize(text)
        return [token for piece in text.split(_CUT) if piece for token in self.tokenize(piece)]

    def _sampling(
        self, params: CallParams, prompt_ids: list[int], session: Session | None, trajectory: str | None
    ) -> SamplingParams:
        """The call's settings, else the session's, else the defaults; checked against what training allows."""
        defaults = session.sampling if session else {}

        def pick(name: str, fallback: Any) -> Any:
            given = getattr(params, name)
            known = given if given is not None else defaults.get(name)
            return known if known is not None else fallback

        temperature, top_p, top_k = pick("temperature", 1.0), pick("top_p", 1.0), pick("top_k", 0)
        if session is not None and not session.is_validation:
            _check_trainable(temperature, top_p, top_k)
        seed = params.seed
        if seed is None and session is not None:
            seed = session.next_seed(tuple(prompt_ids), trajectory)
        fits = self.backend.max_model_len - len(prompt_ids)
        return SamplingParams(
            max_tokens=min(pick("max_tokens", self.default_max_tokens), fits),
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
        """One answer. Keywords: max_tokens, temperature, top_p, top_k, seed, stop, trajectory (a uid the call belongs to), role
        (whose adapter answers, where ``lora.per_role`` gives it one).

        A prompt that is too long ends the episode by `TerminationEvent`, so what the workflow committed is kept.
        """
        trajectory, role = sampling.pop("trajectory", None), sampling.pop("role", None)
        try:
            params, adapter = sampling_keywords(sampling), self.session.adapter_of(role)
            return await self._model.chat(plain_messages(messages), params, self.session, trajectory, adapter=adapter)
        except RequestError as error:
            if error.code == TOO_LONG:
                raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED) from error
            raise


def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Texts that the tokenizer reads as structure, longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    return tuple(sorted((text for text in texts if len(text) > 1), key=len, reverse=True))


def _before_stop(text: str, stops: Sequence[str]) -> str:
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text


def _check_trainable(temperature: float, top_p: float, top_k: int) -> None:
    for name, value, off in (("top_p", top_p, 1.0), ("top_k", top_k, 0)):
        if value != off:
            raise RequestError(
                f"{name}={value} in training: the log-probabilities trained on would not be those sampled from; "
                f"leave it at {off:g}",
                name,
            )
    if temperature == 0:
        raise RequestError("temperature=0 in training: greedy samples have no gradient; use one above 0", "temperature")
