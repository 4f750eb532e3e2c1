"""Data path, loss, metrics, determinism and the other parts that the scripts are made of."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The project's folder; relative names of shipped files are looked up here after the working folder."""


class UserError(Exception):
    """Something a user can cause and mend; its text is one message that names the place and the way out."""

    exit_status = 1


class UsageError(UserError):
    """Options that cannot be meant."""

    exit_status = 2
