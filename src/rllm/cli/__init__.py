"""The `rllm` command. Thin: every command reads its arguments and calls one function.

A `UserError` becomes its message and exit code 2; Ctrl-C exit code 130.
"""

from __future__ import annotations

from rllm.errors import run_cli


def main() -> None:
    """Entry point of `rllm` and of ``python -m rllm.cli``."""
    from rllm.cli.commands import app

    run_cli(lambda: app(standalone_mode=True))
