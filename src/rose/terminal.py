"""What our commands say to people."""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(message: object) -> NoReturn:
    """A user's error: one sentence, exit code 2."""
    typer.echo(f"rose: {message}", err=True)
    raise typer.Exit(2)
