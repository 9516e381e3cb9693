"""Answers in the shapes of OpenAI's chat and completions routes, whole and as events.

Knows outputs and JSON; nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.gateway.chat import ChatModel, Piece
from rllm.gateway.events import event, merged
from rllm.gateway.requests import ReplyForm
from rllm.types import ModelOutput


@dataclass(frozen=True)
class Reply:
    """What all parts of one answer share. `chat`: the chat route, else completions. `apart`: thoughts beside the content."""

    call_id: str
    model_name: str
    form: ReplyForm
    chat: bool
    model: ChatModel
    apart: bool = False

    def whole(self, outputs: Sequence[ModelOutput]) -> dict[str, Any]:
        """The JSON body of an answer that is not streamed."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = []
        for i, output in enumerate(outputs):
            choice: dict[str, Any] = {"index": i, "finish_reason": output.finish_reason, "logprobs": None}
            if self.chat:
                calls = {"tool_calls": output.tool_calls} if output.tool_calls else {}
                content = output.content or (None if calls else "")
                thought = {"reasoning_content": output.reasoning or None} if self.apart else {}
                choice["message"] = {"role": "assistant", "content": content, "refusal": None} | thought | calls
            else:
                choice["text"] = output.content
            if self.form.logprobs:
                choice["logprobs"] = self._logprobs(output.completion_ids, output.logprobs)
            if self.form.token_ids:
                choice |= {"prompt_token_ids": output.prompt_ids, "token_ids": output.completion_ids}
            choices.append(choice)
        return self._head(kind) | {"choices": choices, "usage": _usage(outputs)}

    async def events(self, streams: Sequence[AsyncIterator[Piece | ModelOutput]]) -> AsyncIterator[str]:
        """The same as events: text as it is sampled, tool calls when they are whole, then why it ended."""
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        begun: set[int] = set()
        outputs: dict[int, ModelOutput] = {}
        parts = merged(streams)
        try:
            async for i, part in parts:
                if isinstance(part, ModelOutput):
                    outputs[i] = part
                    yield event(head | {"choices": [self._end(i, part)]})
                elif part.text or part.thought or part.ids:
                    yield event(head | {"choices": [self._piece(i, part, i not in begun)]})
                    begun.add(i)
        finally:
            await parts.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        if self.form.stream_usage:
            usage = _usage([outputs[i] for i in sorted(outputs)])
            yield event(head | {"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.call_id, "object": kind, "created": int(time.time()), "model": self.model_name}

    def _piece(self, i: int, piece: Piece, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": i, "finish_reason": None, "logprobs": None}
        if self.chat:
            thought = {"reasoning_content": piece.thought} if piece.thought else {}
            content = {"content": piece.text} if piece.text or not thought else {}
            choice["delta"] = ({"role": "assistant"} if first else {}) | thought | content
        else:
            choice["text"] = piece.text
        if self.form.logprobs:
            choice["logprobs"] = self._logprobs(piece.ids, piece.logprobs)
        if self.form.token_ids:
            choice["token_ids"] = piece.ids
        return choice

    def _end(self, i: int, output: ModelOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": i, "finish_reason": output.finish_reason, "logprobs": None}
        if self.chat:
            calls = [{"index": k} | call for k, call in enumerate(output.tool_calls)]
            choice["delta"] = {"tool_calls": calls} if calls else {}
        else:
            choice["text"] = ""
        if self.form.token_ids:
            choice["prompt_token_ids"] = output.prompt_ids
        return choice

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        parts = [self.model.renderer.token_bytes(token) for token in ids]
        texts = [part.decode("utf-8", "replace") for part in parts]
        if not self.chat:
            return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": None}
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(part), "top_logprobs": []}
                for text, part, logprob in zip(texts, parts, logprobs, strict=True)
            ]
        }


def _usage(outputs: Sequence[ModelOutput]) -> dict[str, int]:
    prompt, sampled = outputs[0].prompt_length, sum(output.completion_length for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
