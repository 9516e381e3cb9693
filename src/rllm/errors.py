"""Errors meant for the person at the keyboard: what was found, what is allowed, the fix. The CLI shows them without traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable


class UserError(Exception):
    """A mistake in what the user gave (config, data, model, flow). The CLI prints the message and exits with code 2."""


class ConfigError(UserError):
    """A key or value of the configuration that cannot be used."""


class DataError(UserError):
    """A dataset file or row that cannot be used."""


class ModelError(UserError):
    """A model or adapter folder that cannot be used."""


class RunError(UserError):
    """A run that cannot go on for a reason the user can mend (e.g. every episode failed)."""


def run_cli(main: Callable[[], object]) -> None:
    """Run a script's `main`: a `UserError` becomes its message and exit code 2, Ctrl-C exit code 130."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
