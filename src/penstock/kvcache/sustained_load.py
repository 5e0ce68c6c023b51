"""The largest load that a storage sustains at an objective, found by search.

Load is a factor on the workload's own pace. It is sustained if the 95th percentile of load times keeps the
objective, and so does the lag: a storage that falls behind has not sustained anything. Pure.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

_DOUBLINGS: Final = 12
_BISECTIONS: Final = 3
_IMPROVED: Final = 0.9
"""A load time that is above this share of that at twice the load no longer depends on the load."""
_IDLE: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One measured load; `in_flight` is how many operations each rank had on storage, on average."""

    speedup: float
    requests_per_s: float
    load_p95_ms: float
    lag_p95_ms: float
    is_complete: bool
    in_flight: float = 1.0

    def meets(self, objective_ms: float) -> bool:
        """Whether the storage kept up within the objective, and read everything."""
        return self.is_complete and max(self.load_p95_ms, self.lag_p95_ms) <= objective_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedLoad:
    """The largest load that met the objective, None if none did, and all that were measured."""

    objective_ms: float
    best: LoadPoint | None
    points: tuple[LoadPoint, ...]

    def document(self, *, users: int) -> dict[str, Any]:
        """As plain data; `users` are those of the workload's own pace."""
        return {
            "objective_ms": self.objective_ms,
            "users": None if self.best is None else int(users * self.best.speedup),
            "requests_per_s": None if self.best is None else self.best.requests_per_s,
            "points": [asdict(point) | {"meets": point.meets(self.objective_ms)} for point in self.points],
        }


def find_sustained_load(
    measure: Callable[[float], LoadPoint], *, objective_ms: float, first: float = 1.0
) -> SustainedLoad:
    """Double or halve the load until it crosses the objective, then narrow the step down to 10 %.

    Where half the load is no faster, less of it will not be, either: an idle storage misses the objective.
    """
    points = [measure(first)]
    factor = 2.0 if points[0].meets(objective_ms) else 0.5
    for _ in range(_DOUBLINGS):
        points.append(measure(points[-1].speedup * factor))
        if points[-1].meets(objective_ms) is not points[0].meets(objective_ms):
            break
        if factor < 1 and _is_idle(points[-2], points[-1], objective_ms):
            break
    for _ in range(_BISECTIONS):
        best = _best(points, objective_ms)
        worse = [
            point.speedup
            for point in points
            if not point.meets(objective_ms) and (best is None or point.speedup > best.speedup)
        ]
        if best is None or not worse:
            break
        points.append(measure((best.speedup * min(worse)) ** 0.5))
    return SustainedLoad(objective_ms=objective_ms, best=_best(points, objective_ms), points=tuple(points))


def _is_idle(before: LoadPoint, now: LoadPoint, objective_ms: float) -> bool:
    """Whether the storage had little to do and kept up, and was as slow as at the larger load."""
    return (
        now.in_flight < _IDLE
        and max(before.lag_p95_ms, now.lag_p95_ms) <= objective_ms
        and now.load_p95_ms > _IMPROVED * before.load_p95_ms
    )


def _best(points: list[LoadPoint], objective_ms: float) -> LoadPoint | None:
    met = [point for point in points if point.meets(objective_ms)]
    return max(met, key=lambda point: point.speedup, default=None)
