"""What the checkpoint verbs have in common: their options, and how a model and its layout come from them."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.bench.model_state import StateLayout
    from penstock.workload.checkpoint_model import CheckpointModel

ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="llama3-8b, ... (`penstock checkpoint models`), or a YAML file."),
]
Scale = Annotated[
    str, typer.Option("--scale", metavar="SHARE", help="Only this share of every file's bytes, e.g. 0.01.")
]
Subset = Annotated[
    bool, typer.Option("--subset", help="Fewer ranks than the model is laid out for: a part stands for all.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value, e.g. model.num_layers=4; repeatable."),
]


def model_of(name: str, settings: list[str] | None) -> CheckpointModel:
    """The model that a command line names, with its `--set` values."""
    from penstock.workload.checkpoint_model import load_model
    from penstock.workload.overrides import parse_settings

    return load_model(name, overrides=parse_settings(settings or ()))


def layout_of(model: CheckpointModel, *, ranks: int | None, scale: Fraction, subset: bool) -> StateLayout:
    """The model's files on so many ranks."""
    from penstock.bench.model_state import LayoutRequest, plan_layout
    from penstock.workload.choices import CheckpointMode

    mode = CheckpointMode.SUBSET if subset else model.workload.checkpoint.mode
    return plan_layout(LayoutRequest(model=model, num_processes=ranks, scale=scale, mode=mode))


def parse_scale(text: str) -> Fraction:
    """A share, exactly as written: 0.01 is a hundredth; `1/1000` and `1%` will do, too."""
    try:
        is_percent = text.endswith("%")
        scale = Fraction(text.removesuffix("%")) / (100 if is_percent else 1)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(f"{text!r} is no share", where="--scale", fix="Write 0.01, 1% or 1/100.") from error
    if not 0 < scale <= 1:
        raise UsageError(
            f"A scale of {text} makes no checkpoint", where="--scale", fix="Choose above 0, up to 1."
        )
    return scale
