"""The "did you mean" of all error messages: the known name most similar to a mistyped one."""

import difflib
from collections.abc import Iterable

CUTOFF = 0.6
"""The lowest similarity worth a suggestion. Callers with short or very different names may pass another."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = CUTOFF) -> str:
    """Return the entry of `known` most similar to `name`, "" if none is; of ties, the last alphabetically."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = CUTOFF, form: str = "{}") -> str:
    """Return `Did you mean unet3d? ` to begin an error's `fix` with, or "" if no name is similar.

    `form` is the format in which the name is printed, for example `{}://`.
    """
    match = nearest(name, known, cutoff=cutoff)
    return f"Did you mean {form.format(match)}? " if match else ""
