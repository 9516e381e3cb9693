"""A function as a tool: its JSON schema for the model, and a call that always ends in a text, whatever goes wrong.

Knows functions and JSON; nothing of models or episodes.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from rllm.errors import UserError
from rllm.flow import call
from rllm.tools.calls import ToolCall
from rllm.tools.json_text import strict_json

TIMEOUT_S = 30.0
MAX_CHARACTERS = 8000
ERROR = "error: "
_HALF = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(\S.*)$")


class Tool:
    """A function that a model may call. Sync functions run in a thread, so they may block.

    `await tool.call(arguments)` takes the JSON text that the model wrote and gives the text that the model shall read. What goes
    wrong (JSON that cannot be read, arguments that do not fit, an exception, the time limit) is told in a text that begins with
    ``error: ``; the function then ran not at all, or to where it failed: never with arguments that the model did not write.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float = TIMEOUT_S,
        max_characters: int = MAX_CHARACTERS,
    ):
        """`timeout_s` limits one call, `max_characters` the text of its result. Name and description default to the function's."""
        self.fn, self.timeout_s, self.max_characters = fn, timeout_s, max_characters
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        if not _NAME.fullmatch(self.name):
            raise UserError(f"tool name {self.name!r}: use 1 to 64 letters, digits, '_' and '-'")
        summary, notes = _docstring(inspect.getdoc(fn) or "")
        self.description = description or summary
        self._model = _arguments_model(fn, self.name, notes)
        self.parameters = _plain_schema(self._model.model_json_schema())

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as OpenAI's ``tools=`` lists it."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    async def call(self, arguments: str) -> str:
        """The result as text, or a text that begins with ``error: ``. Never raises for a fault of the model or the function."""
        return as_text(await self._called(arguments), self.max_characters)

    async def _called(self, arguments: str) -> str:
        try:
            values = self._read(arguments)
        except ValueError as error:
            return f"{ERROR}{error}"
        deadline, task = asyncio.timeout(self.timeout_s), asyncio.current_task()
        try:
            async with deadline:
                result = await call(self.fn, **values)
        except asyncio.CancelledError as error:
            if task is None or task.cancelling():  # it is the caller who is cancelled
                raise
            return f"{ERROR}{self.name} failed: {_one_line(error)}"
        except (Exception, SystemExit) as error:
            if deadline.expired():
                return f"{ERROR}{self.name} did not end within {self.timeout_s:g} s"
            return f"{ERROR}{self.name} failed: {_one_line(error)}"
        try:
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:  # objects in it are the user's own
            return f"{ERROR}the result of {self.name} cannot be written as text: {_one_line(error)}"

    def _read(self, arguments: str) -> dict[str, Any]:
        """The arguments as the function takes them, or `ValueError` with what the model should know."""
        if not isinstance(arguments, str):
            raise ValueError(f"the arguments of {self.name} must be JSON text, found {type(arguments).__name__}")
        if not arguments.strip() and not self._model.model_fields:
            arguments = "{}"
        try:
            values = strict_json(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of {self.name} are not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"the arguments of {self.name} must be a JSON object, found {type(values).__name__}")
        try:
            checked = self._model.model_validate(values)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
            raise ValueError(f"wrong arguments for {self.name}: {wrong}") from error
        # Defaults that the model left out stay the function's own.
        return {name: getattr(checked, name) for name in values}


def tool(
    fn: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = TIMEOUT_S,
    max_characters: int = MAX_CHARACTERS,
) -> Any:
    """Make a function a `Tool`: the schema comes from its type hints, the texts from its docstring (``Args:`` as Google writes it)."""

    def wrap(function: Callable[..., Any]) -> Tool:
        return Tool(function, name=name, description=description, timeout_s=timeout_s, max_characters=max_characters)

    return wrap if fn is None else wrap(fn)


class Toolset:
    """Tools by name. `schemas` is what OpenAI's ``tools=`` takes."""

    def __init__(self, tools: Iterable[Tool]):
        self.tools: dict[str, Tool] = {}
        for one in tools:
            if one.name in self.tools:
                raise UserError(f"two tools are called {one.name!r}; give one of them another name")
            self.tools[one.name] = one

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [one.schema for one in self.tools.values()]

    async def call(self, name: str, arguments: str) -> str:
        """The text of the result; a name that no tool has is told in a text that begins with ``error: ``."""
        if name not in self.tools:
            text = f"{ERROR}there is no tool called {reprlib.repr(name)}; there are {', '.join(self.tools) or 'none'}"
            return as_text(text, MAX_CHARACTERS)
        return await self.tools[name].call(arguments)

    async def answer(self, wanted: ToolCall) -> str:
        """The same for a call as `parse_tool_calls` finds it in text, malformed ones included."""
        return (
            as_text(f"{ERROR}{wanted.error}", MAX_CHARACTERS)
            if wanted.error
            else await self.call(wanted.name, wanted.arguments)
        )


def as_text(text: str, most: int) -> str:
    """`text` as it can be sent to any endpoint: at most `most` characters of it, without halves of surrogate pairs."""
    if len(text) > most:
        text = f"{text[:most]}\n[cut: {len(text) - most} more characters]"
    return _HALF.sub("\ufffd", text)


def _arguments_model(fn: Callable[..., Any], name: str, notes: dict[str, str]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    try:
        parameters = inspect.signature(fn, eval_str=True).parameters.values()
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"tool {name!r}: its signature cannot be read ({error})") from error
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"tool {name!r}: parameter {parameter.name!r} has no name of its own; give it one")
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (kind, Field(default=default, description=notes.get(parameter.name)))
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, NameError, TypeError) as error:
        raise UserError(f"tool {name!r}: no JSON schema for its parameters: {error}") from error


def _plain_schema(schema: Any) -> Any:
    """A JSON schema without the titles that only repeat names."""
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
        return {key: _plain_schema(value) for key, value in kept.items()}
    return [_plain_schema(item) for item in schema] if isinstance(schema, list) else schema


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """(text before the ``Args:`` section, what that section says of each parameter)."""
    summary, found, section = re.split(r"^Args:[ \t]*$", text, maxsplit=1, flags=re.MULTILINE)[0], {}, ""
    section = text[len(summary) :]
    last = ""
    for line in section.splitlines()[1:]:
        if line and not line[0].isspace():
            break
        match = _ARGUMENT.match(line)
        if match:
            last = match[1]
            found[last] = match[2].strip()
        elif last and line.strip():
            found[last] += f" {line.strip()}"
    return summary.strip(), found


def _one_line(error: BaseException) -> str:
    try:
        said = str(error)
    except Exception:
        said = ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
