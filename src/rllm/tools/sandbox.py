"""What the child process of `PythonTool` runs: limits first, then the code from standard input. Imports nothing of rllm.

Started as ``python -I -S sandbox.py '<json settings>'``. Prints what the code prints; a bare expression at the end is shown as in
the interactive interpreter; an exception is one line.
"""

import ast
import contextlib
import json
import os
import sys

# Whatever these do could reach the network, another program or native code.
FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "os.kill",
    "os.chmod",
    "os.chown",
    "ctypes.",
    "pty.",
    "winreg.",
    "webbrowser.",
    "sys.addaudithook",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.")


def leave_network() -> None:
    """Linux: a network namespace of its own, with no interface, where the system allows one. The audit hook stands in any case."""
    if not sys.platform.startswith("linux"):
        return
    try:
        import ctypes

        new_user, new_net = 0x10000000, 0x40000000
        ctypes.CDLL(None, use_errno=True).unshare(new_user | new_net)
    except (ImportError, OSError, AttributeError):
        pass


def limit(memory_mb: int, cpu_s: int, file_mb: int) -> None:
    """Memory, processor time and file size, where the system has such limits."""
    try:
        import resource
    except ImportError:
        return
    for name, value in (
        ("RLIMIT_AS", memory_mb << 20),
        ("RLIMIT_CPU", cpu_s),
        ("RLIMIT_FSIZE", file_mb << 20),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_CORE", 0),
    ):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, name), (value, value))


def guard(folder: str) -> None:
    """From here on an audit hook, which nothing can take out, refuses `FORBIDDEN` and changes outside of `folder`."""
    inside = os.path.realpath(folder) + os.sep

    def is_outside(path: object) -> bool:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        return isinstance(path, str) and not os.path.realpath(path).startswith(inside)

    def refuse(event: str, args: tuple) -> None:
        if event.startswith(FORBIDDEN):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open" and isinstance(args[2], int) and args[2] & WRITING and is_outside(args[0]):
            raise PermissionError(f"files can only be written in the working folder, not {args[0]!r}")
        if event.startswith(CHANGES) and any(is_outside(path) for path in args if isinstance(path, (str, bytes))):
            raise PermissionError(f"{event} is only allowed in the working folder")

    sys.addaudithook(refuse)


def run(code: str) -> int:
    """Run `code` as the main program; the exit status."""
    try:
        tree = ast.parse(code, "<code>")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        print(f"{type(error).__name__}: {getattr(error, 'msg', error)}{where}")
        return 1
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    names = {"__name__": "__main__"}
    try:
        exec(compile(tree, "<code>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as wanted:
        return wanted.code if isinstance(wanted.code, int) else int(wanted.code is not None)
    except BaseException as error:
        trace, line = error.__traceback__, 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<code>":
                line = trace.tb_lineno
            trace = trace.tb_next
        print(
            f"{type(error).__name__}: {error} (line {line})" if str(error) else f"{type(error).__name__} (line {line})"
        )
        return 1
    return 0


def main() -> None:
    settings = json.loads(sys.argv[1])
    code = sys.stdin.buffer.read().decode("utf-8", "replace")
    if not settings["network"]:
        leave_network()
    limit(settings["memory_mb"], settings["cpu_s"], settings["file_mb"])
    sys.argv = ["<code>"]
    if not settings["network"]:
        guard(os.getcwd())
    status = run(code)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
