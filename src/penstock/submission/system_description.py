"""The schema of a system's description (v3.0), and the problems of a file that violates it, by line.

`penstock submission describe` and the rules share `find_schema_problems`. Invariant: a description is judged
as it is written; only what the schema makes optional has a default.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.did_you_mean import nearest
from penstock.submission.parsed_file import KeyPath, ParsedFile

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Architecture(_Part):
    """How clients reach the storage."""

    storage_location: Literal["remote", "local", "remote_and_local"]
    benchmark_API: Literal["file", "object"]  # noqa: N815 - the schema's name
    product_API: Literal["file", "object", "block"]  # noqa: N815 - the schema's name
    client_footprint: Literal["open_source", "closed_source", "n/a"]
    client_installation: Literal["in_box", "installable", "n/a"]


class Capabilities(_Part):
    """What several hosts can do at the same time, and how long remapping to other hosts takes."""

    multi_host: bool
    simultaneous_write: bool
    simultaneous_read: bool
    remap_time_in_seconds: Amount


class Solution(_Part):
    """What is submitted."""

    submission_name: Text
    friendly_description: Text
    architecture: Architecture
    capabilities: Capabilities


class Supply(_Part):
    """Power supplies of one kind."""

    unit_count: Count
    inlet_voltage: Amount
    nameplate_power_watts: Amount
    efficiency: Text | None = None


class Power(_Part):
    """A device's power."""

    min_psus_active: Count
    psus_configured: Annotated[list[Supply], Field(min_length=1)]


class Chassis(_Part):
    """A node's body; memory in GiB."""

    model_name: Text
    rack_units: Amount | None = None
    cpu_model: Text
    cpu_qty: Count
    cpu_cores: Count
    memory_capacity: Annotated[float, Field(gt=0)]
    power: Power | None = None


class Port(_Part):
    """Network ports of one kind; speed in Gb/s."""

    unit_count: Count
    type: Literal["ethernet", "infiniband", "other"]
    state: Literal["up", "down"]
    speed: Annotated[float, Field(gt=0)] | None = None
    traffic: list[Literal["management", "data", "metadata", "backend"]] | None = None

    @model_validator(mode="after")
    def _require_speed_if_up(self) -> Self:
        missing = [name for name in ("speed", "traffic") if not getattr(self, name)]
        if self.state == "up" and missing:
            raise ValueError(f"a port that is up needs {' and '.join(missing)}")
        return self


class Performance(_Part):
    """A drive's specification."""

    seq_read_MBps: Amount | None = None  # noqa: N815 - the schema's name
    seq_write_MBps: Amount | None = None  # noqa: N815 - the schema's name
    random_read_IOPS: Amount | None = None  # noqa: N815 - the schema's name
    random_write_IOPS: Amount | None = None  # noqa: N815 - the schema's name
    form_factor: Text | None = None
    interface_speed: Text | float | None = None


class DescribedDrive(_Part):
    """Drives of one kind."""

    unit_count: Count
    vendor_name: Text
    model_name: Text
    interface: Literal["nvme", "sas", "sata", "other"]
    media_type: Literal["HDD", "TLC", "QLC", "other"]
    capacity_in_GB: Annotated[float, Field(gt=0)]  # noqa: N815 - the schema's name
    performance: Performance | None = None


class OperatingSystem(_Part):
    """What runs on a node."""

    name: Text
    version: Text


class NamedValue(_Part):
    """A variable or a kernel parameter."""

    name: Text
    value: Text | int | float | bool


class Node(_Part):
    """Nodes of one kind: clients, or nodes of the product."""

    friendly_description: Text
    quantity: Count
    chassis: Chassis
    networking: list[Port] | None = None
    drives: list[DescribedDrive] | None = None
    operating_system: OperatingSystem | None = None
    environment: list[NamedValue] | None = None
    sysctl: list[NamedValue] | None = None


class Switch(_Part):
    """Switches of one kind."""

    friendly_description: Text
    quantity: Count
    model_name: Text | None = None
    rack_units: Amount | None = None
    power: Power | None = None


class SystemUnderTest(_Part):
    """The whole system. A rented one (`cloud`) has neither racks nor power supplies."""

    solution: Solution
    deployment: Literal["onprem", "cloud"]
    clients: Annotated[list[Node], Field(min_length=1)]
    product_nodes: list[Node] | None = None
    product_switches: list[Switch] | None = None
    total_rack_units: Amount | None = None
    rack_power_supplies: list[Power] | None = None


class SystemDescription(_Part):
    """The file."""

    system_under_test: SystemUnderTest


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaProblem:
    """One thing to correct: its path and line in the file (0 if unknown), and what is wrong."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.path}: {self.text}"


def find_schema_problems(description: ParsedFile) -> list[SchemaProblem]:
    """The violations of the schema, in order of lines; `MissingFact` if the file cannot be read."""
    try:
        SystemDescription.model_validate(description.value())
    except ValidationError as error:
        problems = {_describe_error(entry, description.lines) for entry in error.errors(include_url=False)}
        return sorted(problems, key=lambda problem: (problem.line, problem.path))
    return []


def _describe_error(error: Any, lines: Mapping[KeyPath, int]) -> SchemaProblem:
    steps = tuple(str(step) for step in error["loc"] if str(step) not in _TYPE_STEPS)
    path = steps
    while path and path not in lines:
        path = path[:-1]
    text = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        meant = nearest(steps[-1], sorted(_known_keys()))
        text = "there is no such key" + (f"; is {meant} meant?" if meant else "")
    return SchemaProblem(path=".".join(steps), line=lines.get(path, 0), text=text)


_TYPE_STEPS = frozenset({"str", "int", "float", "bool", "constrained-str", "function-after"})


@cache
def _known_keys() -> frozenset[str]:
    return frozenset(name for part in _subclasses(_Part) for name in part.model_fields)


def _subclasses(part: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for subclass in part.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
