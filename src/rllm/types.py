"""The user's words: what a flow, an evaluator and the trainer say to each other.

Page one of the docs. Knows nothing of the rest of the package: no torch, no HTTP, no config.
"""

from __future__ import annotations

import enum
import itertools
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]
"""One chat message in OpenAI's form: ``{"role": ..., "content": ...}``."""


def new_id() -> str:
    """A fresh random identifier (32 hex digits)."""
    return uuid.uuid4().hex


class TerminationReason(enum.StrEnum):
    """Why an episode ended. The value is what metrics and files show."""

    MAX_PROMPT_LENGTH_EXCEEDED = "max_prompt_length_exceeded"
    MAX_RESPONSE_LENGTH_EXCEEDED = "max_response_length_exceeded"
    ENV_DONE = "env_done"
    MAX_TURNS_EXCEEDED = "max_turns_exceeded"
    TIMEOUT = "timeout"
    ERROR = "error"
    UNKNOWN = "unknown"


class TerminationEvent(Exception):
    """Raised inside a workflow to end the episode with a reason; what was recorded so far is kept."""

    def __init__(self, reason: TerminationReason = TerminationReason.UNKNOWN):
        super().__init__(reason.value)
        self.reason = reason


@dataclass
class Task:
    """One problem. `metadata` holds what the evaluator needs (answer, numbers, ...)."""

    id: str
    instruction: str | list[Message] = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    dataset_dir: Path | None = None
    sub_dir: Path | None = None

    @property
    def task_dir(self) -> Path | None:
        if self.dataset_dir is None:
            return None
        return self.dataset_dir / self.sub_dir if self.sub_dir else self.dataset_dir

    @property
    def data_source(self) -> str:
        """The dataset's name for this task; `unknown` where it names none."""
        return str(self.metadata.get("data_source") or "unknown")


@dataclass
class ModelOutput:
    """One answer of the model: its text and the exact tokens it was sampled as.

    `id` is the call id under which the gateway recorded it. `logprobs[i]` is the log-probability of `completion_ids[i]`
    under the distribution it was sampled from (temperature included), `versions[i]` the policy version that sampled it, `adapter`
    the name of the adapter that it was sampled with.
    """

    id: str
    text: str
    content: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    temperature: float = 1.0
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    adapter: str = "default"

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_ids)

    @property
    def completion_length(self) -> int:
        return len(self.completion_ids)


@dataclass
class Step:
    """One LLM call.

    A flow that talks to the gateway only says which call it was: ``Step(id=response.id, action=...)``; prompt ids,
    response ids and log-probabilities are filled in from the record of that call. `id` therefore is the call id.
    """

    id: str = field(default_factory=new_id)
    input: Any = None
    output: Any = None
    action: Any = None
    reward: float = 0.0
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    temperature: float = 1.0
    adapter: str = "default"
    finish_reason: str | None = None
    chat_completions: list[Message] = field(default_factory=list)
    observation: Any = None
    thought: str = ""
    model_response: str = ""
    advantage: float | list[float] | None = None

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) != len(self.response_ids):
            raise ValueError(
                f"Step {self.id}: {len(self.response_ids)} response ids but {len(self.logprobs)} logprobs; "
                "give one log-probability per response token, or none"
            )

    @classmethod
    def from_model_output(cls, output: ModelOutput, messages: list[Message] | None = None, action: Any = None) -> Step:
        """The step that `output` was, with its exact tokens."""
        step = cls(id=output.id, action=action)
        step.fill(output)
        step.chat_completions = [*(messages or []), {"role": "assistant", "content": output.content}]
        return step

    def fill(self, output: ModelOutput) -> None:
        """Take over the recorded tokens of a call. What the flow wrote itself (action, output, ...) stays."""
        self.prompt_ids = list(output.prompt_ids)
        self.response_ids = list(output.completion_ids)
        self.logprobs = list(output.logprobs)
        self.versions = list(output.versions)
        self.temperature = output.temperature
        self.adapter = output.adapter
        self.finish_reason = output.finish_reason
        self.model_response = self.model_response or output.content
        self.thought = self.thought or output.reasoning

    @property
    def info(self) -> dict[str, Any]:
        return self.metadata


DEFAULT_TRAJECTORY_NAME = "default"


@dataclass
class Trajectory:
    """One agent run inside an episode. `name` is its role: trajectories of one task and role are compared.

    `uid` ties calls made through ``config.url_for(uid)`` to this trajectory.
    `reward` None means "not given yet": the evaluator's reward is then assigned.
    """

    name: str = DEFAULT_TRAJECTORY_NAME
    steps: list[Step] = field(default_factory=list)
    reward: float | None = None
    uid: str = field(default_factory=new_id)
    task: Any = None
    input: Any = None
    output: Any = None
    signals: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def role(self) -> str:
        return self.name

    @property
    def result(self) -> Any:
        return self.output

    def is_cumulative(self) -> bool:
        """Whether each step's chat extends the one before it."""
        chats = [step.chat_completions for step in self.steps]
        return all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(chats))


@dataclass
class Episode:
    """One attempt at a task by the whole flow.

    `id` is ``"{task id}:{rollout index}"``; a task id may itself hold colons. `error` holds the traceback of a failed episode.
    """

    id: str = ""
    task: Any = None
    trajectories: list[Trajectory] = field(default_factory=list)
    termination_reason: TerminationReason | None = None
    is_correct: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str = ""
    error: str | None = None

    @property
    def task_id(self) -> str:
        return self.id.rpartition(":")[0] if re.search(r":\d+$", self.id) else self.id

    @property
    def rollout_idx(self) -> int:
        match = re.search(r":(\d+)$", self.id)
        return int(match.group(1)) if match else 0

    @property
    def failed(self) -> bool:
        return self.termination_reason in (TerminationReason.ERROR, TerminationReason.TIMEOUT)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready data (what `episodes.jsonl` holds)."""
        return _plain(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Episode:
        """The episode that `to_dict` wrote. What was no plain data then (objects in `output` or `metadata`) is text now. Fields that
        are not an episode's are passed over."""

        def own(kind: Any, values: Mapping[str, Any], **more: Any) -> Any:
            known = {f.name: values[f.name] for f in fields(kind) if f.name in values}
            return kind(**(known | more))

        trajectories = [
            own(Trajectory, t, steps=[own(Step, s) for s in t.get("steps") or ()])
            for t in data.get("trajectories") or ()
        ]
        task, reason = data.get("task"), data.get("termination_reason")
        paths = {name: None for name in ("dataset_dir", "sub_dir")}
        return own(
            cls,
            data,
            task=own(Task, task, **paths) if isinstance(task, Mapping) and "id" in task else task,
            trajectories=trajectories,
            termination_reason=TerminationReason(reason) if reason else None,
        )


@dataclass
class TrajectoryGroup:
    """The trajectories of one (task, role): the ones that are compared with each other."""

    task_id: str
    role: str
    trajectories: list[Trajectory]

    @property
    def group_id(self) -> str:
        return f"{self.task_id}:{self.role}"


@dataclass(frozen=True)
class AgentConfig:
    """What a flow is told: where the model is and how this episode is run.

    Give `base_url` and `model` to any OpenAI client. ``url_for(uid)`` is a base URL whose calls are recorded as steps of the
    trajectory with that uid, for flows that run several agents at once and return no steps themselves.
    ``model_for(role)`` is the model name for the calls of one role: with ``lora.per_role`` each role has an adapter of its own
    (those in `roles`), else it is `model`. `sampling_params` is informational: the gateway applies it where a call does not say
    otherwise.
    """

    base_url: str
    model: str
    session_uid: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    is_validation: bool = False
    sampling_params: dict[str, Any] = field(default_factory=dict)
    api_key: str = "rllm"
    roles: tuple[str, ...] = ()

    def model_for(self, role: str) -> str:
        """Model name that samples with the adapter of `role`; the one model where all roles share it."""
        return f"{self.model}:{role}" if role in self.roles else self.model

    def url_for(self, trajectory_uid: str) -> str:
        """Base URL for the calls of one trajectory of this episode. The uid may hold letters, digits, ``.``, ``_`` and ``-``."""
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", trajectory_uid):
            raise ValueError(f"trajectory uid {trajectory_uid!r}: use 1 to 128 letters, digits, '.', '_' or '-'")
        head, _, tail = self.base_url.rstrip("/").rpartition("/")
        return f"{head}/t/{trajectory_uid}/{tail}"


@dataclass
class Signal:
    """A named number about an episode, e.g. ``Signal("solver_acc", 0.5)``; becomes ``Episode.metrics[name]``."""

    name: str
    value: float
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class EvalOutput:
    """What an evaluator says of an episode."""

    reward: float
    is_correct: bool = False
    signals: list[Signal] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


# Deeper than this, or going round in a circle, a value is told as text.
_PLAIN_DEPTH = 64


def _plain(value: Any, depth: int = 0) -> Any:
    """JSON-ready data that looks like `value`; what no JSON can say is text. Nothing is copied that need not be: user objects may hold
    locks and connections."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if depth < _PLAIN_DEPTH:
        if is_dataclass(value) and not isinstance(value, type):
            return {f.name: _plain(getattr(value, f.name, None), depth + 1) for f in fields(value)}
        if isinstance(value, Mapping):
            return {_text(key): _plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [_plain(item, depth + 1) for item in value]
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # it is the user's own __str__ or __repr__
        return f"<{type(value).__name__}>"
