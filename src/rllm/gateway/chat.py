"""From messages to exact prompt tokens, a sampled answer and its record. HTTP and workflows both go through here.

Knows the backend's `sample` and the rendered chat; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rllm.backends.base import DEFAULT_ADAPTER, Backend, OnToken, SamplingParams, Scored
from rllm.gateway import hermes
from rllm.gateway.errors import RequestError
from rllm.gateway.messages import ToolUse, canonical_json, plain_messages, plain_tools
from rllm.gateway.recorder import Call, Session
from rllm.gateway.render import Renderer
from rllm.gateway.requests import CallParams, sampling_keywords
from rllm.gateway.text_stream import TextStream
from rllm.gateway.thinking import ThoughtStream, split_thought
from rllm.tools.calls import THINK
from rllm.types import Message, ModelOutput, TerminationEvent, TerminationReason, new_id

logger = logging.getLogger(__name__)
TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Prompt:
    """A chat or a text as tokens. `forced` is what the answer is made to begin with: the end of `ids`. For the rest see `Call`."""

    ids: list[int]
    messages: list[Message] = field(default_factory=list)
    as_sampled: list[Message] = field(default_factory=list)
    text: str = ""
    forced: str = ""
    tools: ToolUse | None = None
    extends: str | None = None
    rewritten_by: str | None = None
    frame: bytes = b""


@dataclass(frozen=True)
class Prepared:
    """One call, checked and ready to be sampled."""

    call_id: str
    prompt: Prompt
    stop: tuple[str, ...]
    sampling: SamplingParams
    adapter: str
    session: Session | None
    trajectory: str | None
    order: int
    apart: bool = False
    """Whether the caller is told the thought beside the content."""

    @property
    def opened(self) -> bool:
        """Whether the template began a thought, which the answer goes on with."""
        return self.prompt.text.rstrip().endswith(THINK)


@dataclass(frozen=True)
class Piece:
    """A part of an answer under way: text that is new, and all the tokens and log-probabilities since the piece before."""

    text: str
    ids: list[int]
    logprobs: list[float]
    thought: str = ""


class ChatModel:
    """A backend behind messages. `max_prompt_length` in tokens. `reasoning` split: thoughts are told beside the content where a call
    does not say. Safe to use from several threads."""

    def __init__(
        self,
        backend: Backend,
        max_prompt_length: int | None = None,
        default_max_tokens: int = 512,
        reasoning: Literal["content", "split"] = "content",
        template: Mapping[str, Any] | None = None,
    ):
        """`template`: settings of the chat template where a call does not give them."""
        self.backend, self.template = backend, dict(template or {})
        self.max_prompt_length = min(max_prompt_length or backend.max_model_len, backend.max_model_len - 1)
        self.default_max_tokens, self.reasoning = default_max_tokens, reasoning
        self.renderer = Renderer(backend.tokenizer)
        self._told_of_rewriting = False

    async def chat(
        self,
        messages: list[Message],
        params: CallParams,
        session: Session | None = None,
        trajectory: str | None = None,
        call_id: str | None = None,
        adapter: str | None = None,
        tools: ToolUse | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> ModelOutput:
        """Answer a chat of plain messages. With a session the call is recorded there, under `call_id` or a fresh one. `settings` are
        the template's own."""
        prompt = self.chat_prompt(messages, session, trajectory, tools, settings)
        return await self.answer(self.prepare(prompt, params, session, trajectory, call_id, adapter))

    def chat_prompt(
        self,
        messages: list[Message],
        session: Session | None = None,
        trajectory: str | None = None,
        tools: ToolUse | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Tokens of a chat that ends with the assistant's turn to speak.

        Where the chat extends a recorded call, its exact tokens are taken and only what is new is rendered, provided the template
        leaves the earlier part as it was; else the whole chat is rendered anew.
        """
        self._check_size(sum(len(message["content"]) for message in messages), "messages")
        settings = self.template | dict(settings or {})
        listed, forced = list(tools.tools) if tools else [], hermes.forced_start(tools)
        earlier, n, known = session.earlier(messages, trajectory) if session else (None, 0, False)
        ids, as_sampled, text = None, messages, ""
        if earlier is not None:
            said: Message = {"role": "assistant", "content": earlier.output.text}
            as_sampled = [*earlier.as_sampled, said, *messages[n:]]
            try:
                text = self.renderer.text(as_sampled, listed, settings)
                ids = self._extended(earlier, text, forced)
            except RequestError:  # a template may refuse an answer as it was sampled
                pass
        extends = earlier.output.id if earlier is not None and ids is not None else None
        frame, by = _frame(listed, settings), None
        if known or (earlier is not None and ids is None):
            by = "template" if not known and earlier is not None and earlier.frame == frame else "client"
        if ids is None:
            as_sampled, text = messages, self.renderer.text(messages, listed, settings)
            ids = self.renderer.encode(text + forced)
        if session and by:  # what was rewritten can come to tokens that go on from recorded ones all the same
            continued, latest = session.continued(ids, trajectory)
            extends, by = (continued, None) if latest else (extends or continued, by)
        return Prompt(ids, messages, as_sampled, text, forced, tools, extends, by, frame)

    def text_prompt(
        self, prompt: str | Sequence[int], session: Session | None = None, trajectory: str | None = None
    ) -> Prompt:
        """A raw text, in which special tokens are meant, or token ids."""
        if isinstance(prompt, str):
            self._check_size(len(prompt), "prompt")
        ids = self.renderer.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        return Prompt(ids, extends=session.continued(ids, trajectory)[0] if session else None)

    def prepare(
        self,
        prompt: Prompt,
        params: CallParams,
        session: Session | None = None,
        trajectory: str | None = None,
        call_id: str | None = None,
        adapter: str | None = None,
        choice: int = 0,
    ) -> Prepared:
        """Check a call against the limits, and settle how it is sampled. Its place in the session's order is taken here. `choice`: which
        of several answers to one request it is."""
        _check_length(prompt, self.max_prompt_length, "data.max_prompt_length and the model's length")
        return Prepared(
            call_id=call_id or f"chatcmpl-{new_id()}",
            prompt=prompt,
            stop=params.stop,
            sampling=self._sampling(params, prompt, session, trajectory, choice),
            adapter=adapter or (session.adapter_of(None) if session else DEFAULT_ADAPTER),
            session=session,
            trajectory=trajectory,
            order=session.next_order() if session else 0,
            apart=bool(prompt.messages) and self._apart(params),
        )

    def _check_size(self, characters: int, param: str) -> None:
        """Refuse what cannot fit however it is tokenized, before minutes are spent on counting its tokens."""
        if characters > self.max_prompt_length * self.renderer.most_characters:
            raise RequestError(
                f"the prompt has {characters} characters, too many for the tokens that fit; at most {self.max_prompt_length} are allowed "
                "(data.max_prompt_length and the model's length)",
                param,
                TOO_LONG,
            )

    def _apart(self, params: CallParams) -> bool:
        wanted = params.separate_reasoning
        return self.reasoning == "split" if wanted is None else wanted

    async def answer(self, call: Prepared) -> ModelOutput:
        """Sample a call and record it. `text` is the whole turn, `content` what the caller is told: up to a stop text, without the
        tool calls, and without the thought if that is told apart."""
        return (await self._answer(call, None))[0]

    async def _answer(self, call: Prepared, on_token: OnToken | None) -> tuple[ModelOutput, str]:
        """(the answer, its content with the thought in it)."""
        prompt, hear = call.prompt, {} if on_token is None else {"on_token": on_token}
        completion = await self.backend.sample(prompt.ids, call.sampling, call.adapter, **hear)
        if not len(completion.ids) == len(completion.logprobs) == len(completion.versions):
            raise RuntimeError(
                f"the sampler gave {len(completion.ids)} tokens, {len(completion.logprobs)} log-probabilities and "
                f"{len(completion.versions)} versions; there must be one of each for a token"
            )
        sampled = self.renderer.decode(completion.ids)
        told = _before_stop(sampled, call.stop) if completion.finish_reason == "stop" else sampled
        content, calls = prompt.forced + told, []
        if prompt.tools is not None and prompt.tools.parses:
            content, calls = hermes.parse_calls(content, call.opened and not prompt.forced)
        thought, said = split_thought(content, call.opened)
        output = ModelOutput(
            id=call.call_id,
            text=prompt.forced + sampled,
            content=said if call.apart else content,
            prompt_ids=prompt.ids,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason="tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason,
            temperature=call.sampling.temperature,
            reasoning=thought,
            tool_calls=calls,
            adapter=call.adapter,
        )
        if call.session is not None:
            self._record(call, call.session, output)
        return output, content

    async def stream(self, call: Prepared) -> AsyncIterator[Piece | ModelOutput]:
        """`answer` as it is sampled: pieces whose texts together are the content (and whose thoughts the thought, if that is told apart),
        then the output. Closing it ends the sampling."""
        parses = call.prompt.tools is not None and call.prompt.tools.parses
        # What is forced begins a call, which is told at the end: nothing of it is shown before.
        shown = (
            None if call.prompt.forced else TextStream(self.renderer.decode, call.stop, hermes.OPEN if parses else None)
        )
        thoughts = ThoughtStream(call.opened) if call.apart else None
        heard: list[tuple[int, float]] = []
        told = 0
        news = asyncio.Event()

        def on_token(token: int, logprob: float) -> None:
            heard.append((token, logprob))
            news.set()

        answer = asyncio.ensure_future(self._answer(call, on_token))
        answer.add_done_callback(lambda _: news.set())
        read = 0
        try:
            while not answer.done():
                await news.wait()
                news.clear()
                fresh = [token for token, _ in heard[read:]]
                read = len(heard)
                text = shown.push(fresh) if shown is not None and fresh and not answer.done() else ""
                thought, text = thoughts.push(text) if thoughts is not None else ("", text)
                if text or thought:
                    ids, logprobs = zip(*heard[told:], strict=True)
                    yield Piece(text, list(ids), list(logprobs), thought)
                    told = read
            output, content = answer.result()
            rest, thought = shown.finish(content) if shown is not None else content, ""
            if thoughts is not None:
                (thought, rest), (late, last) = thoughts.push(rest), thoughts.finish()
                thought, rest = thought + late, rest + last
            yield Piece(rest, output.completion_ids[told:], output.logprobs[told:], thought)
            yield output
        finally:
            answer.cancel()

    async def score(self, ids: Sequence[int], adapter: str) -> Scored:
        """What the policy `adapter` says of each token of a prompt but the first."""
        return await asyncio.to_thread(self.backend.score, ids, adapter)

    def nothing_sampled(self, prompt: Prompt, call_id: str, adapter: str) -> ModelOutput:
        """The answer to a call that asks about its prompt alone. Nothing was sampled, so nothing is recorded."""
        _check_length(prompt, self.backend.max_model_len, "the model's length")
        return ModelOutput(call_id, "", "", prompt.ids, [], [], [], "length", adapter=adapter)

    def text_of(self, ids: Sequence[int]) -> str:
        """All of `ids` as text, tokens of structure too."""
        return self.backend.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token as text of its own."""
        return [self.backend.tokenizer.decode([token]) for token in ids]

    def _extended(self, earlier: Call, text: str, forced: str) -> list[int] | None:
        """Recorded tokens of `earlier` + those of what follows in `text`; None where the template writes the earlier part otherwise."""
        for spoken in dict.fromkeys((earlier.output.text, earlier.output.text.rstrip(), earlier.output.text.strip())):
            # Templates may trim an answer; its tokens stay as they are.
            start = earlier.prompt_text + self.renderer.guard(spoken)
            if text.startswith(start):
                rest = text[len(start) :]
                break
        else:
            return None
        sampled = earlier.output.completion_ids
        ended_by = self.renderer.marker(sampled[-1]) if sampled else None
        if ended_by is not None:  # the end of turn was sampled; the template writes it too
            if not rest.startswith(ended_by):
                return None
            rest = rest[len(ended_by) :]
        return [*earlier.output.prompt_ids, *sampled, *self.renderer.encode(rest + forced)]

    def _record(self, call: Prepared, session: Session, output: ModelOutput) -> None:
        prompt, rewrote = call.prompt, None
        if prompt.rewritten_by is not None:
            rewrote = session.rewrite(prompt.ids, call.trajectory, prompt.rewritten_by == "template")
            if not self._told_of_rewriting:
                self._told_of_rewriting = True
                what = (
                    "the chat template writes earlier turns"
                    if rewrote.by == "template"
                    else "the agent sent earlier turns or tools"
                )
                logger.warning(
                    "%s otherwise than they were sampled (first at token %d: recorded %s, now %s): such a call starts "
                    "a new segment, trained as a row of its own; counted in gateway/rewritten",
                    what,
                    rewrote.at,
                    rewrote.recorded,
                    rewrote.found,
                )
        session.record(
            Call(
                output,
                prompt.messages,
                call.trajectory,
                call.order,
                extends=prompt.extends,
                rewrote=rewrote,
                apart=call.apart,
                as_sampled=prompt.as_sampled,
                prompt_text=prompt.text,
                frame=prompt.frame,
            )
        )

    def _sampling(
        self, params: CallParams, prompt: Prompt, session: Session | None, trajectory: str | None, choice: int
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
            seed = session.next_seed(tuple(prompt.ids), trajectory)
        one_call = prompt.tools is not None and prompt.tools.parses and not prompt.tools.parallel
        return SamplingParams(
            max_tokens=min(pick("max_tokens", self.default_max_tokens), self.backend.max_model_len - len(prompt.ids)),
            temperature=float(temperature),
            top_p=float(top_p),
            top_k=int(top_k),
            seed=seed,
            stop=(*params.stop, hermes.CLOSE) if one_call else params.stop,
        ).of_choice(choice if params.seed is not None else 0)


class SessionEngine:
    """The model as a workflow sees it: in process, recorded in its session."""

    def __init__(self, model: ChatModel, session: Session):
        self._model, self.session = model, session

    async def get_model_response(self, messages: list[Message], **sampling: Any) -> ModelOutput:
        """One answer. Keywords: max_tokens, temperature, top_p, top_k, seed, stop, separate_reasoning, tools, tool_choice, parallel_tool_calls,
        trajectory (a uid the call belongs to), role (whose adapter answers, where ``lora.per_role`` gives it one).

        A prompt that is too long ends the episode by `TerminationEvent`, so what the workflow committed is kept.
        """
        trajectory, role = sampling.pop("trajectory", None), sampling.pop("role", None)
        asked = [sampling.pop(name, None) for name in ("tools", "tool_choice", "parallel_tool_calls")]
        try:
            params, adapter, tools = sampling_keywords(sampling), self.session.adapter_of(role), plain_tools(*asked)
            return await self._model.chat(
                plain_messages(messages), params, self.session, trajectory, adapter=adapter, tools=tools
            )
        except RequestError as error:
            if error.code == TOO_LONG:
                raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED) from error
            raise


def _frame(tools: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> bytes:
    """What a template is given beside the messages, as a digest."""
    return hashlib.blake2b(canonical_json([list(tools), dict(settings)]).encode(), digest_size=16).digest()


def _check_length(prompt: Prompt, most: int, why: str) -> None:
    where = "messages" if prompt.messages else "prompt"
    if len(prompt.ids) > most:
        raise RequestError(
            f"the prompt has {len(prompt.ids)} tokens; at most {most} are allowed ({why})", where, TOO_LONG
        )
    if not prompt.ids:
        raise RequestError("the prompt has no tokens", where)


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
