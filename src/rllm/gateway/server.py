"""The gateway as a running thing, with the sessions that are open.

Knows sessions; threads and ports are in `thread.py`, routes in `app.py`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rllm.backends.base import DEFAULT_ADAPTER, Backend
from rllm.gateway.chat import ChatModel, SessionEngine
from rllm.gateway.recorder import Session
from rllm.gateway.thread import AppThread
from rllm.types import AgentConfig


@dataclass(frozen=True)
class TokenLimits:
    """What tokens a model can be trained on: ids below `vocab_size`, at most `length` of them in a row."""

    vocab_size: int
    length: int


class Gateway(AppThread):
    """An OpenAI endpoint on loopback over `backend`. Use as ``with`` or call `start` and `stop`."""

    def __init__(
        self,
        backend: Backend,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_prompt_length: int | None = None,
        default_max_tokens: int = 512,
        models: Mapping[str, str] | None = None,
        roles: Sequence[str] = (),
        reasoning: Literal["content", "split"] = "content",
        template: Mapping[str, Any] | None = None,
    ):
        """`models`: what may be asked for outside of sessions, each with its adapter; the first answers where none is named.
        `roles` have an adapter of their own. `reasoning`, `template`: see `ChatModel`."""
        super().__init__(host, port)
        self.model = ChatModel(backend, max_prompt_length, default_max_tokens, reasoning, template)
        self.models = dict(models or {backend.model_name: DEFAULT_ADAPTER})
        self.roles = tuple(roles)
        self._sessions: dict[str, Session] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def make_app(self) -> Any:
        from rllm.gateway.app import create_app

        return create_app(self.model, self._sessions.get, self.models)

    def stop(self) -> None:
        """End the thread and free the port; calls under way are cancelled."""
        super().stop()
        self._sessions.clear()

    @property
    def token_limits(self) -> TokenLimits:
        backend = self.model.backend
        return TokenLimits(len(backend.tokenizer), backend.max_model_len)

    def engine(self, session: Session) -> SessionEngine:
        """The model as a workflow sees it."""
        return SessionEngine(self.model, session)

    def open_session(
        self,
        uid: str,
        *,
        seed: int = 0,
        is_validation: bool = False,
        sampling: Mapping[str, Any] | None = None,
        adapter: str = DEFAULT_ADAPTER,
    ) -> Session:
        """Begin recording under `uid` (which becomes part of a URL: letters, digits, ``.``, ``_``, ``-``)."""
        session = Session(uid, seed, is_validation, dict(sampling or {}), adapter, frozenset(self.roles))
        self._sessions[uid] = session
        return session

    def close_session(self, session: Session) -> None:
        """Its URLs answer 404 from now on; the record stays with the caller. A training session is counted in `take_counts`."""
        if self._sessions.pop(session.uid, None) is not None and not session.is_validation:
            with self._lock:
                self._counts.update(session.counts())

    def take_counts(self) -> dict[str, float]:
        """``gateway/calls|segments|rewritten`` of the training sessions closed since this was last asked: see `Session.counts`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {f"gateway/{name}": float(counts[name]) for name in ("calls", "segments", "rewritten")}

    def agent_config(self, session: Session, metadata: Mapping[str, Any] | None = None) -> AgentConfig:
        """What a flow is told about its session."""
        return AgentConfig(
            base_url=f"{self.url}/s/{session.uid}/v1",
            model=next(iter(self.models)),
            session_uid=session.uid,
            metadata=dict(metadata or {}),
            is_validation=session.is_validation,
            sampling_params=dict(session.sampling),
            roles=self.roles,
        )
