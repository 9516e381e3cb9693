"""The Python tool: what code prints comes back; what it must not do, or takes too much of, becomes an error text."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rllm.tools import PythonTool
from rllm.tools.python import SANDBOX

TOOL = PythonTool(timeout_s=2.0)


def run(code: str, tool: PythonTool = TOOL) -> str:
    return asyncio.run(tool.call(json.dumps({"code": code})))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("37 * 42", "1554"),
        ("x = 2\nprint(x)\nx ** 10", "2\n1024"),
        ("x = 1", "(no output)"),
        ("print('é→')", "é→"),
        ("import math, fractions, re, statistics, itertools\nfractions.Fraction(1, 3)", "Fraction(1, 3)"),
        ("open('a', 'w').write('kept')\nopen('a').read()", "'kept'"),
        ("print(1)\n1 / 0", "error: 1\nZeroDivisionError: division by zero (line 2)"),
        ("def f(:", "error: SyntaxError: invalid syntax (line 1)"),
        ("import sys\nsys.exit(3)", "error: exit status 3"),
        ("input()", "error: EOFError: EOF when reading a line (line 1)"),
    ],
)
def test_code_gives_what_it_prints_or_its_error_in_one_line(code: str, text: str) -> None:
    assert run(code) == text


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(60)", "import re; re.match(r'(a+)+b', 'a' * 99)"]
)
def test_code_that_does_not_end_is_ended(code: str) -> None:
    started = time.monotonic()
    assert run(code, PythonTool(timeout_s=0.5)) == "error: the code did not end within 0.5 s"
    assert time.monotonic() - started < 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory limit is the system's")
def test_memory_is_limited() -> None:
    assert run("x = [0] * 10**9", PythonTool(memory_mb=256)) == "error: MemoryError (line 1)"


def test_output_is_limited_while_it_is_written() -> None:
    started = time.monotonic()
    text = run("while True: print('x' * 1000)", PythonTool(timeout_s=20, max_characters=100))
    assert text.startswith("error: ended after more than 100 characters of output") and time.monotonic() - started < 5


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('127.0.0.1', PORT))",
        "import socket; socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:PORT')",
        "import _socket; _socket.socket()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import os; os.fork()",
        "import os; os.kill(os.getppid(), 9)",
        "import ctypes; ctypes.CDLL(None)",
        "open('FOLDER/x', 'w')",
        "import os; os.open('FOLDER/x', os.O_CREAT | os.O_WRONLY)",
        "import pathlib; pathlib.Path('FOLDER/x').mkdir()",
        "import os; os.remove('FOLDER/there')",
        "import os; os.rename('FOLDER/there', 'here')",
        "import os; os.utime('FOLDER/there', (5, 5))",
        "import os; os.setxattr('FOLDER/there', 'user.a', b'1')",
        "import os; os.open('x', os.O_CREAT | os.O_WRONLY, dir_fd=os.open('FOLDER', os.O_RDONLY))",
        "import os; os.unlink('there', dir_fd=os.open('FOLDER', os.O_RDONLY))",
        "import os; os.symlink('FOLDER/x', 'link'); open('link', 'w')",
        "import sqlite3; sqlite3.connect('FOLDER/x').execute('create table a (b)')",
        "import sqlite3, pathlib; sqlite3.connect(pathlib.Path('FOLDER/x')).execute('create table a (b)')",
        "import sqlite3; sqlite3.connect('file:FOLDER/x?mode=rwc', uri=True).execute('create table a (b)')",
        "import resource, os; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (9, 9))",
        "import sys; sys.audit('sys.remote_exec', 1, 'x')",
    ],
)
def test_network_programs_and_files_elsewhere_are_refused(code: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = run(code.replace("PORT", str(server.getsockname()[1])).replace("FOLDER", str(tmp_path)))
    assert text.startswith("error: ") and ("not allowed" in text or "only" in text)
    assert list(tmp_path.iterdir()) == [there]


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.mkfifo('FOLDER/x')",
        "import os; os.mknod('FOLDER/x')",
        "import os, signal; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 0)",
        "import os; os.sched_setaffinity(os.getppid(), [0])",
        "import posix; posix.mkfifo('FOLDER/x')",
    ],
)
def test_what_no_hook_hears_of_is_taken_away(code: str, tmp_path: Path) -> None:
    assert "has no attribute" in run(code.replace("FOLDER", str(tmp_path))) and list(tmp_path.iterdir()) == []


FORK_EXEC = """
import os, _posixsubprocess
a = (["FOLDER/program"], [b"FOLDER/program"], True, (), None, None, -1, -1, -1, -1, -1, -1, *os.pipe(), True, False)
print(_posixsubprocess.fork_exec(*a, 0, None, None, None, -1, None, *([False] if sys.version_info < (3, 14) else [])))
import time; time.sleep(1)
"""


@pytest.mark.parametrize(
    "code",
    [
        f"import sys{FORK_EXEC}",
        f"import sys, _posixsubprocess\ndel sys.modules['_posixsubprocess'], _posixsubprocess{FORK_EXEC}",
        "import sys\ndel sys.modules['posix']\nimport posix\nposix.mkfifo('FOLDER/x')",
        "import subprocess; subprocess.run(['FOLDER/program'])",
    ],
)
def test_without_the_kernels_help_no_program_is_started_either(code: str, tmp_path: Path) -> None:
    program, made = tmp_path / "program", tmp_path / "made"
    program.write_text(f"#!/bin/sh\ntouch {made}\n")
    program.chmod(0o700)
    sandbox = SANDBOX
    start = (
        f"import sys; sys.argv.pop(0); source = open({str(sandbox)!r}).read(); names = {{'__name__': 'sandbox'}}; exec(source, names); "
        "names['lock_files_and_signals'] = lambda folder: None; names['main']()"
    )
    settings = json.dumps({"memory_mb": 512, "cpu_s": 5, "file_mb": 1, "network": False})
    folder = tmp_path / "work"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start, "sandbox", settings],
        input=code.replace("FOLDER", str(tmp_path)),
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 1 and "is not allowed here" in done.stdout, done
    assert not made.exists() and not (tmp_path / "x").exists()


def test_asyncio_can_be_imported() -> None:
    assert run("import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))", PythonTool(network=True)) == "5"


def has_landlock() -> bool:
    return sys.platform.startswith("linux") and ctypes.CDLL(None).syscall(444, None, 0, 1) >= 1


@pytest.mark.skipif(not has_landlock(), reason="the kernel has no Landlock")
@pytest.mark.parametrize(
    "code",
    [
        "import sqlite3; sqlite3.connect(':memory:').execute(\"attach 'FOLDER/x' as a\")",
        "import readline; readline.write_history_file('FOLDER/x')",
    ],
)
def test_the_kernel_refuses_what_native_code_writes_elsewhere(code: str, tmp_path: Path) -> None:
    text = run(code.replace("FOLDER", str(tmp_path)))
    assert text.startswith("error: ") and list(tmp_path.iterdir()) == []


def test_a_data_base_in_the_working_folder_is_allowed_and_the_number_of_files_is_limited() -> None:
    assert run("import sqlite3; sqlite3.connect('a').execute('create table a (b)'); print('made')") == "made"
    code = "for i in range(100):\n    open(str(i), 'w').close()"
    assert "more than 64 files were written" in run(code)


def test_no_variable_of_this_process_reaches_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    assert "hidden" not in run("import os; print(dict(os.environ))")


def test_network_can_be_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('through')"
        assert run(code, PythonTool(network=True)) == "through"
    assert "os.system is not allowed" in run("import os; os.system('true')", PythonTool(network=True))


def test_calls_side_by_side_do_not_see_each_other_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def many() -> list[str]:
        codes = [f"import os\nopen('{i}', 'w').close()\nos.listdir()" for i in range(8)]
        return list(await asyncio.gather(*(TOOL.call(json.dumps({"code": code})) for code in codes)))

    assert asyncio.run(many()) == [f"['{i}']" for i in range(8)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
def test_a_call_that_is_given_up_leaves_no_process() -> None:
    async def given_up() -> None:
        async with asyncio.timeout(0.5):
            await TOOL.call(json.dumps({"code": "import time; time.sleep(60)"}))

    with pytest.raises(TimeoutError):
        asyncio.run(given_up())
    mine = [p for p in Path("/proc").glob("[0-9]*/stat") if f") S {os.getpid()} " in p.read_text()]
    assert not [p for p in mine if "sandbox.py" in p.with_name("cmdline").read_text()]
