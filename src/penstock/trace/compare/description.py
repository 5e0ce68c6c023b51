"""The description of a comparison: `runs.yaml`.

Place in the flow: its edge. One invariant: globs are relative to the file that they stand in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from penstock.trace.documents import Document
from penstock.trace.lens import DEFAULT_PHASES, Lens, PhaseRule, check_pattern, parse_phase
from penstock.units import parse_rate


def _phase(text: str) -> str:
    parse_phase(text)
    return text


def _rate(text: str) -> str:
    parse_rate(text)
    return text


Phase = Annotated[str, AfterValidator(_phase)]
Pattern = Annotated[str, AfterValidator(check_pattern)]
Rate = Annotated[str, AfterValidator(_rate)]
Globs = str | tuple[str, ...]


class Comparison(Document):
    """Runs by name, in the order in which tables show them, and how to look at them."""

    runs: Annotated[dict[str, Globs], Field(min_length=1)]
    baseline: str = ""
    app_event: str = "heckpoint"
    tiers: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    file_classes: Literal["strip-digits"] | dict[str, Pattern] = "strip-digits"
    phases: tuple[Phase, ...] = ()
    files: tuple[str, ...] = ()
    device_rates: dict[str, Rate] = Field(default_factory=dict)
    where: str = ""

    @model_validator(mode="after")
    def _baseline_is_a_run(self) -> Self:
        if self.baseline and self.baseline not in self.runs:
            raise ValueError(f"the baseline {self.baseline!r} is none of the runs {', '.join(self.runs)}")
        for tier in self.device_rates:
            if tier not in self.tiers:
                raise ValueError(
                    f"device_rates speaks of {tier!r}; there are the tiers {', '.join(self.tiers)}"
                )
        return self

    @property
    def baseline_run(self) -> str:
        """The run that others are measured by: the first, unless another is named."""
        return self.baseline or next(iter(self.runs))

    def lens(self) -> Lens:
        """How events are seen; own rules of phases go before the default ones."""
        own: tuple[PhaseRule, ...] = tuple(map(parse_phase, self.phases))
        return Lens(
            tiers={name: (some,) if isinstance(some, str) else some for name, some in self.tiers.items()},
            file_classes={} if self.file_classes == "strip-digits" else self.file_classes,
            phases=(*own, *DEFAULT_PHASES),
        )

    def device_rates_bytes_per_s(self) -> Mapping[str, float]:
        """What the devices of a tier give one host at most, where the description says so."""
        return {tier: parse_rate(text) for tier, text in self.device_rates.items()}
