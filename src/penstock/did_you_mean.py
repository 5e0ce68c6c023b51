"""The "did you mean" of all error messages: the known name that a mistyped one most resembles."""

import difflib
from collections.abc import Iterable

CUTOFF = 0.6
"""Least similarity that is worth a suggestion; callers with short or very varied names may pass their own."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = CUTOFF) -> str:
    """The entry of `known` that resembles `name` most, "" if none does. Ties go to the later one."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = CUTOFF, form: str = "{}") -> str:
    """`Did you mean unet3d? `, to be put before the rest of an error's `fix`; "" if nothing comes near.

    `form` is how the name is printed, for example `{}://`.
    """
    match = nearest(name, known, cutoff=cutoff)
    return f"Did you mean {form.format(match)}? " if match else ""
