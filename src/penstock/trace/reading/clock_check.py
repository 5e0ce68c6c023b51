"""Whether the times of several trace files can belong together: one clock, one unit, one century, no copies.

Every length of time that is asked of a set is wrong if one file counts nanoseconds where microseconds are
expected, or if a host's clock is years off. Nothing is corrected; it is said.
"""

from collections.abc import Hashable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from penstock.trace.event_schema import FileAccount

APART_US: Final = 30 * 86_400 * 1_000_000
"""Files of one run that are further apart than this were not recorded by clocks that agree."""

_YEAR_US: Final = 31_556_952 * 1_000_000
_PLAUSIBLE_US: Final = (30 * _YEAR_US, 130 * _YEAR_US)
"""From 2000 to 2100."""


def find_clock_mismatches(accounts: Sequence[FileAccount]) -> list[str]:
    """Files whose times cannot be right, alone or beside each other; one sentence each."""
    timed = sorted((account for account in accounts if account.first_us is not None), key=_first)
    return [*_find_wrong_units(timed), *_find_gaps(timed), *_find_copies(timed)]


def _first(account: FileAccount) -> int:
    return account.first_us or 0


def _find_wrong_units(timed: Sequence[FileAccount]) -> Iterator[str]:
    for unit, ratio in (("nanoseconds", 1000), ("milliseconds", 1 / 1000), ("seconds", 1 / 1_000_000)):
        wrong = [account for account in timed if _is_in_unit(account, ratio)]
        if wrong:
            yield (
                f"Times of {_name(wrong)} look like {unit} that were read as microseconds (the first is of"
                f" {_date(_first(wrong[0]))}): durations are wrong, too. A line of metadata time_metric tells"
                " DFTracer's unit"
            )


def _is_in_unit(account: FileAccount, ratio: float) -> bool:
    """Whether a first time is no date in our years, but one in this unit.

    Documents of Chrome often count from the start of the machine, so that small times are no mistake there.
    """
    if ratio < 1 and account.dialect != "json lines":
        return False
    low_us, high_us = _PLAUSIBLE_US
    first_us = _first(account)
    return not low_us <= first_us < high_us and low_us <= first_us / ratio < high_us


def _find_gaps(timed: Sequence[FileAccount]) -> Iterator[str]:
    groups: list[list[FileAccount]] = []
    last_us = 0
    for account in timed:
        if not groups or _first(account) - last_us > APART_US:
            groups.append([])
        groups[-1].append(account)
        last_us = max(last_us, account.last_us or 0)
    if len(groups) > 1:
        told = "; ".join(f"{_name(group)} from {_date(_first(group[0]))} on" for group in groups)
        yield (
            f"The clocks or units of these files do not agree, so spans, timelines and overlaps over all of"
            f" them are wrong: {told}"
        )


def _find_copies(timed: Sequence[FileAccount]) -> Iterator[str]:
    """Files whose events seem to be the same, so that each question counts them several times."""
    alike: dict[Hashable, list[FileAccount]] = {}
    for account in timed:
        num_events = account.events + account.salvaged
        if num_events < 2 or _first(account) < _PLAUSIBLE_US[0]:
            # Many times since the start of a job begin with nought.
            continue
        who = account.dialect, _first(account), frozenset(account.hosts), frozenset(account.ranks)
        # A copy that was cut ends earlier: where ranks are known, the first microsecond is enough.
        rest = () if account.ranks else (account.last_us, num_events)
        alike.setdefault((*who, *rest), []).append(account)
    for copies in alike.values():
        if len(copies) > 1:
            yield (
                f"{_name(copies)} begin in the same microsecond and do not differ in host or rank: if they"
                " are copies, their events count several times"
            )


def _name(accounts: Sequence[FileAccount]) -> str:
    """The first files of several, with their hosts."""
    names = []
    for account in accounts[:3]:
        hosts = ", ".join(sorted(account.hosts)[:3])
        names.append(f"{account.file} (host {hosts})" if hosts else account.file)
    more = f" and {len(accounts) - 3} more" if len(accounts) > 3 else ""
    return ", ".join(names) + more


def _date(time_us: int) -> str:
    year = 1970 + time_us // _YEAR_US
    if not 1 <= year <= 9998:
        return f"the year {year:,}"
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M UTC")
