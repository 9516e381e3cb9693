"""What the child process of `PythonTool` runs: limits first, then the code from standard input. Imports nothing of rllm.

Started as ``python -I -S sandbox.py '<json settings>'``. Prints what the code prints; a bare expression at the end is shown as in
the interactive interpreter; an exception is one line.
"""

import ast
import contextlib
import json
import os
import sys

# Whatever these do could reach another program or native code, or change what is not the working folder's.
FORBIDDEN = (
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
    "os.setxattr",
    "os.removexattr",
    "resource.",
    "sqlite3.enable_load_extension",
    "sqlite3.load_extension",
    "sys.remote_exec",
    "ctypes.",
    "pty.",
    "winreg.",
    "webbrowser.",
    "sys.addaudithook",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.utime", "shutil.",
)  # fmt: skip
# What no hook hears of and no one needs: it changes other processes, or makes files that are no data.
TAKEN = (
    "mkfifo", "mknod", "pidfd_open", "setpriority", "sched_setaffinity", "sched_setparam", "sched_setscheduler",
)  # fmt: skip
# Modules that are changed here: a second copy of one would not be.
CHANGED = ("posix", "_signal", "_posixsubprocess")
# Each may have `file_mb`.
MOST_FILES = 64


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


def lock_files_and_signals(folder: str) -> None:
    """Linux with Landlock: whatever code runs, native or not, changes no file outside of `folder` and signals no other process."""
    if not sys.platform.startswith("linux"):
        return
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        create, add, restrict = 444, 445, 446  # the same on every processor
        version = libc.syscall(create, None, 0, 1)
        if version < 1:
            return
        execute, read, special = 1, 0b1100, 1 << 6 | 1 << 11  # programs; files and folders; devices
        files = (1 << (12 + min(version, 3))) - 1 & ~read
        scoped = 2 if version >= 6 else 0  # signals
        rules = (ctypes.c_uint64 * 3)(files, 0, scoped)
        ruleset = libc.syscall(create, rules, 8 if version < 4 else 16 if version < 6 else 24, 0)
        where = os.open(folder, os.O_RDONLY)
        allowed = (files & ~execute & ~special).to_bytes(8, sys.byteorder) + where.to_bytes(4, sys.byteorder)
        if libc.syscall(add, ruleset, 1, allowed, 0) == 0:
            libc.prctl(38, 1, 0, 0, 0)  # no new privileges, which Landlock asks for
            libc.syscall(restrict, ruleset, 0)
        os.close(where)
        os.close(ruleset)
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


def guard(folder: str, network: bool) -> None:
    """From here on an audit hook, which nothing can take out, refuses `FORBIDDEN` and changes outside of `folder`."""
    inside = os.path.realpath(folder) + os.sep
    forbidden = FORBIDDEN if network else (*FORBIDDEN, "socket.")
    written: set = set()

    def is_outside(path: object) -> bool:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        return isinstance(path, str) and not (os.path.realpath(path) + os.sep).startswith(inside)

    def refuse(event: str, args: tuple) -> None:
        if event.startswith(forbidden):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open" and isinstance(args[2], int) and isinstance(args[0], (str, bytes)):
            if args[2] & WRITING:
                check_written(args[0])
            elif args[1] is None and is_outside(args[0]) and os.path.isdir(args[0]):
                # By its descriptor, files in it could be opened under names that look like the working folder's.
                raise PermissionError(f"of folders, only the working folder can be opened, not {args[0]!r}")
        if event == "import" and args[0] in CHANGED:
            raise PermissionError(f"a second {args[0]} is not allowed here")
        if event == "sqlite3.connect":
            name = os.fsdecode(args[0])
            if name.startswith("file:"):
                raise PermissionError("a data base is only opened by its path here, not by a URI")
            if name not in (":memory:", ""):
                check_written(name)
        if event.startswith(CHANGES) and any(is_outside(path) for path in args if isinstance(path, (str, bytes))):
            raise PermissionError(f"{event} is only allowed in the working folder")

    def check_written(path: str | bytes) -> None:
        if is_outside(path):
            raise PermissionError(f"files can only be written in the working folder, not {path!r}")
        written.add(os.path.realpath(path))
        if len(written) > MOST_FILES:
            raise PermissionError(f"more than {MOST_FILES} files were written")

    sys.addaudithook(refuse)


def take_away() -> None:
    """Remove `TAKEN` from the modules that have them, and what starts programs without any hook hearing of it."""
    import signal

    with contextlib.suppress(ImportError):
        import _posixsubprocess

        def fork_exec(*_: object) -> None:
            raise PermissionError("fork_exec is not allowed here")

        _posixsubprocess.fork_exec = fork_exec  # `subprocess` looks for one when it is imported
    for module in (os, sys.modules.get("posix"), signal, sys.modules.get("_signal")):
        for name in (*TAKEN, "pidfd_send_signal"):
            if hasattr(module, name):
                delattr(module, name)


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
    lock_files_and_signals(os.getcwd())
    take_away()
    sys.argv = ["<code>"]
    guard(os.getcwd(), settings["network"])
    status = run(code)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
