"""A tool that runs Python code in a child process of its own: limited in time, memory, output and reach.

Knows processes; what the child does to itself is in `sandbox.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from rllm.tools.tool import ERROR, Tool

SANDBOX = Path(__file__).with_name("sandbox.py")
FILE_MB = 16
DESCRIPTION = "Run Python code and return what it prints. A bare expression on the last line is printed too. Nothing is kept between calls."


class PythonTool(Tool):
    """``python(code)``: each call is a fresh interpreter in an empty temporary folder, with no variables of this process.

    Limits: `timeout_s` of wall and processor time, `memory_mb`, `max_characters` of output. Without `network` the child moves to an
    empty network namespace where Linux allows it; an audit hook, and Landlock where the kernel has it, refuse sockets, other programs,
    ctypes, and writing outside of its folder. Files that the user can read can be read. That holds against what models write by mistake; it is no prison
    for code that means harm: run such code in a container. Only the standard library is there unless `site_packages`.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
        max_characters: int = 2000,
        network: bool = False,
        site_packages: bool = False,
        name: str = "python",
        description: str = DESCRIPTION,
    ):
        async def python(code: str) -> str:
            return await self._run(code)

        # The limit of the tool itself is the later one, so that the child is seen to have ended.
        super().__init__(
            python, name=name, description=description, timeout_s=timeout_s + 5, max_characters=max_characters
        )
        self.limit_s, self.site_packages = timeout_s, site_packages
        self._most = 4 * max_characters  # bytes: a character has up to four
        self.settings = json.dumps(
            {"memory_mb": memory_mb, "cpu_s": int(timeout_s) + 1, "file_mb": FILE_MB, "network": network}
        )

    async def _run(self, code: str) -> str:
        with tempfile.TemporaryDirectory(prefix="rllm-python-", ignore_cleanup_errors=True) as folder:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *(["-I"] if self.site_packages else ["-I", "-S"]),
                str(SANDBOX),
                self.settings,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=folder,
                env=_environment(),
                start_new_session=os.name == "posix",
            )
            try:
                async with asyncio.timeout(self.limit_s):
                    output = await self._exchange(child, code)
                    # With output left to read, asyncio may not see the end of the child; `_drained` reads it.
                    status = await child.wait() if len(output) <= self._most else 1
            except TimeoutError:
                return f"{ERROR}the code did not end within {self.limit_s:g} s"
            finally:
                _kill(child)
                await asyncio.shield(_drained(child))
        text = output.decode("utf-8", "replace").rstrip("\n")
        if len(output) > self._most:
            return f"{ERROR}ended after more than {self.max_characters} characters of output, which began with\n{text[:500]}"
        if status == 0:
            return text or "(no output)"
        if status < 0:
            text = f"{text}\nended by {signal.Signals(-status).name}".lstrip("\n")
        return f"{ERROR}{text or f'exit status {status}'}"

    async def _exchange(self, child: asyncio.subprocess.Process, code: str) -> bytes:
        """Hand over the code and read what comes, up to a little more than is shown; then the child is ended."""
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            child.stdin.write(code.encode("utf-8", "replace"))
            await child.stdin.drain()
        child.stdin.close()
        output = b""
        while len(output) <= self._most and (part := await child.stdout.read(self._most + 1 - len(output))):
            output += part
        return output


def _environment() -> dict[str, str]:
    """No variable of this process (keys, tokens) reaches the child, except what Windows needs to start one."""
    kept = {name: os.environ[name] for name in ("SYSTEMROOT", "WINDIR") if name in os.environ}
    return {**kept, "PYTHONIOENCODING": "utf-8", "PYTHONDONTWRITEBYTECODE": "1"}


async def _drained(child: asyncio.subprocess.Process) -> None:
    """Wait for the end of a killed child and of its output, so that no pipe of it stays open."""
    assert child.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            while await child.stdout.read(1 << 16):
                pass
    await child.wait()


def _kill(child: asyncio.subprocess.Process) -> None:
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        if os.name == "posix":
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
