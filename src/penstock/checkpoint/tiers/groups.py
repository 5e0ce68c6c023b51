"""Who protects whom: ranks are put into groups of which no two members share a failure domain.

Pure: every rank derives the same groups from the same list of domains. Invariant: every rank is in exactly
one group, and a group meets each domain at most once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.errors import UsageError

Group = tuple[int, ...]
"""Ranks, in the order in which the group's pieces are laid out."""


def choose_groups(domains: Sequence[str], members: int, *, smallest: int = 2) -> tuple[Group, ...]:
    """Groups of about `members` ranks; `domains[rank]` is what fails together with that rank.

    Groups are as equal as they can be and never larger than asked for; where a domain holds many ranks they
    are smaller, because each of its ranks needs a group of its own. `UsageError` if one would fall below
    `smallest`.
    """
    if members == 1:
        return tuple((rank,) for rank in range(len(domains)))
    crowds = Counter(domains)
    num_groups = max(-(-len(domains) // members), max(crowds.values(), default=0))
    by_domain = sorted(range(len(domains)), key=lambda rank: (-crowds[domains[rank]], domains[rank], rank))
    # Dealt out in order of domains, the ranks of one domain are neighbours and so fall into different groups.
    groups = tuple(tuple(sorted(by_domain[first::num_groups])) for first in range(num_groups))
    if min((len(group) for group in groups), default=smallest) < smallest:
        crowd, num_ranks = crowds.most_common(1)[0]
        raise UsageError(
            f"{len(domains)} ranks in {len(crowds)} failure domains ({num_ranks} of them in {crowd!r}) "
            f"cannot make groups of {smallest} or more without two members in one domain",
            fix="Use more hosts, a smaller group, or name finer failure domains (failure_domain=).",
        )
    return groups
