"""Measure a user's own loader, and find out what its consumer waits for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.bench.training.training_result import TrainingResult

__all__ = ["measure_loader"]


def measure_loader(
    factory: Callable[..., Any],
    *,
    results: str | Path,
    step: float | Callable[[Any], object] = 0.0,
    epochs: int = 1,
    max_steps: int | None = None,
    batch_size: int | None = None,
    data: str = "",
    trials: tuple[str, ...] = (),
) -> TrainingResult:
    """Measure the loader that `factory` returns, on one rank, as `penstock training run --loader` would.

    `step` is the number of seconds that each step computes, or a function that is called with the batch.
    `data` is the URI of the data that the loader reads; it is evicted from the page cache before each epoch.
    `trials` are changes such as `workers=8`. The result's `stages.waits` divides the waiting time among its
    causes.
    """
    # Workers import the package but need none of this.
    from penstock.bench.own_loader.own_loader_run import OwnLoaderRequest, run_own_loader  # noqa: PLC0415
    from penstock.bench.own_loader.user_code import DescribedLoader  # noqa: PLC0415
    from penstock.cluster.comm import SoloComm  # noqa: PLC0415
    from penstock.progress import Progress  # noqa: PLC0415
    from penstock.storage.uri import open_here  # noqa: PLC0415
    from penstock.workload.quantities import Duration  # noqa: PLC0415
    from penstock.workload.spec import Train, Workload  # noqa: PLC0415

    function, batch_time_s = (step, 0.0) if callable(step) else (None, step)
    name = getattr(factory, "__name__", type(factory).__name__)
    train = Train(epochs=epochs, computation_time=Duration(mean_s=batch_time_s))
    request = OwnLoaderRequest(
        results=Path(results),
        workload=Workload(name=name, train=train),
        loader=DescribedLoader(name=name, step=getattr(function, "__name__", None), batch_size=batch_size),
        factory=factory,
        step=function,
        max_steps=max_steps,
        seed=0,
        data=open_here(data) if data else None,
        trials=trials,
    )
    return run_own_loader(request, comm=SoloComm(), progress=Progress())
