"""What devices moved beside what the application did, in lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.results.delivery import Delivery

MOST_NAMED = 4


def delivery_lines(deliveries: Sequence[Delivery]) -> Iterator[tuple[str, str]]:
    """A title and a line for each direction; what does not pass has its reason in a line of its own."""
    from penstock.units import format_bytes

    for each in deliveries:
        title = f"devices, {each.direction}"
        if each.delivered_bytes is None:
            yield title, f"not checked: {each.why}"
            continue
        names = sorted(each.by, key=lambda name: -each.by[name])
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        by = ", ".join(names[:MOST_NAMED])
        wanted = format_bytes(each.application_bytes)
        moved = f"{format_bytes(each.delivered_bytes)} for {wanted} of the application"
        yield title, f"{moved}, by {by}{more}" if by else moved
        if each.verdict != "pass":
            yield "", f"{'FLAGGED' if each.verdict == 'fail' else each.verdict}: {each.why}"


def delivery_notes(deliveries: Sequence[Delivery]) -> Iterator[str]:
    """What keeps figures from being the storage's, a sentence each."""
    for each in deliveries:
        if each.verdict == "fail":
            yield f"Not all bytes came from storage: {each.why}"
