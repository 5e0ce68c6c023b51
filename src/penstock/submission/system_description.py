"""The schema of a system's description (v3.0), and the problems of a file that violates it, with their lines.

`penstock submission describe` and the rules share `find_schema_problems`. Invariant: a description is judged
as it is written, and only optional keys have defaults.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from penstock.did_you_mean import nearest
from penstock.submission.parsed_file import KeyPath, MissingFact, ParsedFile


def _unquote(value: object) -> object:
    """Convert a number that was written as a string, because people quote more in YAML than they need to."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


Count = Annotated[int, Field(ge=1), BeforeValidator(_unquote)]
Amount = Annotated[float, Field(ge=0), BeforeValidator(_unquote)]
Positive = Annotated[float, Field(gt=0), BeforeValidator(_unquote)]
Capacity = Annotated[float, Field(ge=1), BeforeValidator(_unquote)]
"""A capacity in TiB."""
Text = Annotated[str, Field(min_length=1)]
Word = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
"""A word, ignoring case."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Architecture(_Part):
    """The path from the clients to the storage."""

    storage_location: Literal["remote", "local", "remote_and_local"]
    benchmark_API: Literal["file", "object"]  # noqa: N815 - the schema's name
    product_API: Literal["file", "object", "block"]  # noqa: N815 - the schema's name
    client_footprint: Literal["open_source", "closed_source", "n/a"]
    client_installation: Literal["in_box", "installable", "n/a"]

    @model_validator(mode="after")
    def _agree_on_the_client(self) -> Self:
        if (self.client_footprint == "n/a") != (self.client_installation == "n/a"):
            raise ValueError("client_footprint and client_installation are both n/a, or neither is")
        return self


class Capabilities(_Part):
    """Simultaneous access by several hosts, and the time that remapping to other hosts takes."""

    multi_host: bool
    simultaneous_write: bool
    simultaneous_read: bool
    remap_time_in_seconds: Amount

    @model_validator(mode="after")
    def _remap_only_where_hosts_take_turns(self) -> Self:
        takes_turns = not (self.simultaneous_write and self.simultaneous_read)
        if takes_turns != (self.remap_time_in_seconds > 0):
            raise ValueError(
                "remap_time_in_seconds is 0 with simultaneous_write and simultaneous_read, and more without"
            )
        return self


class Solution(_Part):
    """The submitted product; RDI is research, development or internal."""

    submission_name: Text
    friendly_description: Text
    usable_capacity_tib: Capacity
    availability: Literal["available", "preview", "RDI"]
    int_client_store_tib: Capacity | None = None
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

    @model_validator(mode="after")
    def _have_enough(self) -> Self:
        num = sum(supply.unit_count for supply in self.psus_configured)
        if self.min_psus_active > num:
            raise ValueError(f"{self.min_psus_active} supplies are active, of {num} that are configured")
        return self


class Chassis(_Part):
    """The chassis of a node; memory in GiB."""

    model_name: Text
    rack_units: Amount | None = None
    cpu_model: Text
    cpu_qty: Count
    cpu_cores: Count
    memory_capacity: Positive
    power: Power | None = None


class Port(_Part):
    """Network ports of one kind; speed in Gb/s."""

    unit_count: Count
    type: Literal["ethernet", "infiniband", "other"]
    state: Literal["up", "down"]
    speed: Positive | None = None
    traffic: list[Literal["management", "data", "metadata", "backend"]] | None = None

    @model_validator(mode="after")
    def _require_speed_if_up(self) -> Self:
        missing = [name for name in ("speed", "traffic") if not getattr(self, name)]
        if self.state == "up" and missing:
            raise ValueError(f"a port that is up needs {' and '.join(missing)}")
        return self


class Performance(_Part):
    """A drive's specification; other keys of vendors' data sheets are ignored."""

    model_config = ConfigDict(extra="ignore")

    seq_read_MBps: Amount | None = None  # noqa: N815 - the schema's name
    seq_write_MBps: Amount | None = None  # noqa: N815 - the schema's name
    random_read_IOPS: Amount | None = None  # noqa: N815 - the schema's name
    random_write_IOPS: Amount | None = None  # noqa: N815 - the schema's name
    form_factor: Text | None = None
    interface_speed: Text | float | None = None


class DescribedDrive(_Part):
    """Drives of one kind; other keys of their inventory are ignored."""

    model_config = ConfigDict(extra="ignore")

    unit_count: Count
    vendor_name: Text
    model_name: Text
    interface: Annotated[Literal["nvme", "sas", "sata", "other"], Word]
    media_type: Literal["HDD", "TLC", "QLC", "other"]
    capacity_in_GB: Positive  # noqa: N815 - the schema's name
    performance: Performance | None = None


class OperatingSystem(_Part):
    """The operating system of a node."""

    name: Text
    version: Text


class NamedValue(_Part):
    """An environment variable or a kernel parameter."""

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
    """Switches of one kind that serve nothing but the storage; `ports` and `configuration` have any form."""

    unit_count: Count
    vendor_name: Text
    model_name: Text
    ports: list[dict[str, Any]] | None = None
    configuration: list[NamedValue] | None = None
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
    """The whole file of a description."""

    system_under_test: SystemUnderTest


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaProblem:
    """One thing to correct: its path and line in the file (0 if unknown), and what is wrong.

    `is_accepted` means that reviewers have accepted descriptions with this problem.
    """

    path: str
    line: int
    text: str
    is_accepted: bool = False

    def __str__(self) -> str:
        return f"line {self.line}: {self.path}: {self.text}"


MAX_PROBLEMS = 100
"""A file with more problems is not a description, and its lines are not reported one by one."""


def find_schema_problems(description: ParsedFile) -> list[SchemaProblem]:
    """Find the violations of the schema, in the order of lines.

    Raises `MissingFact` if the file cannot be read.
    """
    problems = set(_find_hardware_problems(description))
    try:
        SystemDescription.model_validate(description.value())
    except ValidationError as error:
        found = error.errors(include_url=False)[:MAX_PROBLEMS]
        problems |= {_describe_error(entry, description.lines) for entry in found}
    return sorted(problems, key=lambda problem: (problem.line, problem.path, problem.text))


def _describe_error(error: Any, lines: Mapping[KeyPath, int]) -> SchemaProblem:
    steps = tuple(str(step) for step in error["loc"] if str(step) not in _TYPE_STEPS)
    text, is_accepted = error["msg"].removeprefix("Value error, "), False
    if error["type"] == "extra_forbidden":
        known = {key for part in _Part.__subclasses__() for key in part.model_fields}
        meant = nearest(steps[-1], sorted(known))
        text = "there is no such key" + (f"; is {meant} meant?" if meant else "")
    elif error["input"] is None and "product_nodes" in steps and steps[-1] in _FACTS_OF_A_SERVER:
        text, is_accepted = "null, which is accepted for hardware that is not a server", True
    elif error["input"] in ("", None):
        text = f"fill in {text.removeprefix('Input should be ')}"
    return SchemaProblem(
        path=".".join(steps), line=_line_of(steps, lines), text=text, is_accepted=is_accepted
    )


_FACTS_OF_A_SERVER = frozenset({"cpu_model", "cpu_qty", "cpu_cores", "memory_capacity"})
"""Fabric modules and blade enclosures have none of these, and the schema has no word for such parts."""


def _line_of(path: KeyPath, lines: Mapping[KeyPath, int]) -> int:
    """Return the line of a path, or of the nearest path above it."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 0)


def _find_hardware_problems(description: ParsedFile) -> Iterator[SchemaProblem]:
    """Find contradictions between hardware keys, even if other keys are wrong."""
    system = "system_under_test"
    location = (system, "solution", "architecture", "storage_location")
    is_onprem = description.has(system, "deployment") and description.value(system, "deployment") == "onprem"
    is_remote = description.has(*location) and description.value(*location) == "remote"
    has_nodes = description.has(system, "product_nodes") and description.value(system, "product_nodes") != []
    if is_onprem and is_remote and not has_nodes:
        yield SchemaProblem(
            path=f"{system}.product_nodes",
            line=_line_of((system,), description.lines),
            text="required on premises where storage_location is remote: rack units and power come from it",
        )
    itemized = itemized_rack_units(description)
    total = (system, "total_rack_units")
    if is_onprem and itemized is not None and description.has(*total):
        stated = _unquote(description.value(*total))
        if isinstance(stated, int | float) and stated != itemized:
            yield SchemaProblem(
                path=".".join(total),
                line=_line_of(total, description.lines),
                text=f"{stated:g}, but the product's nodes and switches take {itemized:g}",
                is_accepted=True,
            )


def itemized_rack_units(description: ParsedFile) -> float | None:
    """Return the rack units of the product's nodes and switches, or None unless all of them state theirs."""
    units = list(_of_product(description, lambda node, body: node.number(*body, "rack_units")))
    known = [each for each in units if each is not None]
    return sum(known) if known and len(known) == len(units) else None


def provisioned_watts(description: ParsedFile) -> float | None:
    """Return the nameplate power of the product, including spare supplies; None if it is not required.

    Clients do not count, so storage inside clients has no figure; a rented system has no power supplies.
    """
    system = "system_under_test"
    try:
        deployment = description.text(system, "deployment")
        location = description.text(system, "solution", "architecture", "storage_location")
    except MissingFact:  # the schema's rule names it
        return None
    known = [watts for watts in _of_product(description, _read_watts) if watts is not None]
    return sum(known) if known and deployment == "onprem" and location != "local" else None


def _of_product(
    description: ParsedFile, read: Callable[[ParsedFile, KeyPath], float]
) -> Iterator[float | None]:
    """For each kind of product node and switch, yield its figure times its quantity, or None if unknown."""
    for kind, count, body in (
        ("product_nodes", "quantity", ("chassis",)),
        ("product_switches", "unit_count", ()),
    ):
        path = ("system_under_test", kind)
        for part in description.parts(*path).values() if description.has(*path) else ():
            try:
                yield part.number(count) * read(part, body)
            except MissingFact:  # the schema's rule names what is missing
                yield None


def _read_watts(part: ParsedFile, body: KeyPath) -> float:
    supplies = part.parts(*body, "power", "psus_configured").values()
    return sum(supply.number("nameplate_power_watts") * supply.number("unit_count") for supply in supplies)


_TYPE_STEPS = frozenset({"str", "int", "float", "bool", "constrained-str", "function-after"})
