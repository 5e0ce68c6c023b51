"""A document between two marks: what login shells and launchers print around it does no harm. Pure."""

from __future__ import annotations

BEGIN = "<<penstock-facts"
END = "penstock-facts>>"


def framed(document: str) -> str:
    """`document`, which is one line, between the marks."""
    return f"\n{BEGIN}\n{document}\n{END}\n"


def unframed(said: str) -> str | None:
    """The document in what an agent said; None if there is none, or its end did not arrive."""
    _, begun, rest = said.partition(f"{BEGIN}\n")
    document, ended, _ = rest.partition(f"\n{END}")
    return document if begun and ended else None
