"""Tools for agents: `tool` makes one of a function, `Toolset` calls them by name, `PythonTool` runs code in a child process."""

from __future__ import annotations

from rllm.tools.calls import ToolCall, parse_tool_calls
from rllm.tools.python import PythonTool
from rllm.tools.tool import Tool, Toolset, tool

__all__ = ["PythonTool", "Tool", "ToolCall", "Toolset", "parse_tool_calls", "tool"]
