"""Draft the description of a system under test from cluster facts; the submitter fills in the rest.

Pure: turns facts into values and text. Invariant: a file that a submitter has edited is never rewritten; a
diff shows where the file differs from the machines.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

import yaml

from penstock.cluster.facts.host_facts import ClusterFacts, Drive, HostReport, Nic
from penstock.submission.system_description import Architecture, Capabilities

_GIB: Final = 2**30
_GB: Final = 10**9
_SIGNIFICANT_DIGITS: Final = 4


BLANKS: Final[Mapping[str, tuple[str, str]]] = {
    "friendly_description": ("in a few words", '"a rehearsal"'),
    "usable_capacity_tib": ("TiB, 1 or more; fractions are welcome", "1"),
    "availability": ("available, preview or RDI", "available"),
    "storage_location": ("remote, local or remote_and_local", "local"),
    "benchmark_API": ("file or object: what the benchmark spoke", "file"),
    "product_API": ("file, object or block", "file"),
    "client_footprint": ("open_source, closed_source or n/a", "n/a"),
    "client_installation": ("in_box, installable or n/a", "n/a"),
    "multi_host": ("true or false", "false"),
    "simultaneous_write": ("true or false: several hosts at once", "true"),
    "simultaneous_read": ("true or false: several hosts at once", "true"),
    "remap_time_in_seconds": ("0, or how long a change of hosts takes", "0"),
    "deployment": ("onprem or cloud", "onprem"),
    "traffic": ("a list of: management, data, metadata, backend", "[data]"),
    "speed": ("Gb/s", "1"),
    "vendor_name": ("the drive's vendor", '"a rehearsal"'),
    "media_type": ("HDD, TLC, QLC or other", "other"),
    "model_name": ("as it is sold", '"a rehearsal"'),
    "cpu_model": ("as it is sold", '"a rehearsal"'),
    "cpu_qty": ("processors in a node", "1"),
    "cpu_cores": ("cores in a node", "1"),
    "memory_capacity": ("GiB", "1"),
}
"""The keys whose values only the submitter knows, each with a hint and the value that a rehearsal writes."""
_PLACEHOLDER: Final = "# placeholder: "
_HEAD: Final = (
    "# The system under test. What is null is yours to fill in; nodes, switches, rack units and power\n"
    "# supplies of the product are yours to add: product_nodes is required on premises with remote storage.\n"
    "# `penstock submission describe` checks it, by line.\n"
)
_REHEARSED_HEAD: Final = (
    "# The system under test, for a rehearsal. Values that could not be collected are placeholders.\n"
)
REHEARSED_PICTURE: Final = (files("penstock.submission.authoring") / "rehearsed_picture.pdf").read_bytes()
"""A PDF of one page, which a rehearsal uses as the picture of the system."""


def draft_description(facts: ClusterFacts, name: str) -> dict[str, Any]:
    """Return the collected facts under the schema's keys. The submitter fills in each None."""
    # Nodes are counted by their YAML, because dictionaries cannot be hashed.
    clients = Counter(_dump(_client(present.report)) for present in facts.present)
    return {
        "system_under_test": {
            "solution": {
                "submission_name": name,
                **dict.fromkeys(("friendly_description", "usable_capacity_tib", "availability")),
                "architecture": dict.fromkeys(Architecture.model_fields),
                "capabilities": dict.fromkeys(Capabilities.model_fields),
            },
            "deployment": None,
            "clients": [
                {"friendly_description": None, "quantity": quantity, **yaml.safe_load(text)}
                for text, quantity in clients.items()
            ],
        }
    }


def initial_text(tree: Mapping[str, Any], *, is_rehearsal: bool = False) -> str:
    """Return the file's initial content. A missing value has a hint or, in a rehearsal, is made up."""
    lines = []
    for line in _dump(tree).splitlines():
        key, _, value = line.strip().lstrip("- ").partition(": ")
        hint, placeholder = BLANKS.get(key, ("fill in", "")) if value == "null" else ("", "")
        if placeholder and is_rehearsal:
            lines.append(f"{line.removesuffix('null')}{placeholder}  {_PLACEHOLDER}{hint}\n")
        else:
            lines.append(f"{line}  # {hint}\n" if hint and not is_rehearsal else f"{line}\n")
    return (_REHEARSED_HEAD if is_rehearsal else _HEAD) + "".join(lines)


def find_placeholders(text: str) -> tuple[str, ...]:
    """List the placeholders left in the text, each with its line and key."""
    return tuple(
        f"line {number}: {line.split(':')[0].strip().removeprefix('- ')}"
        for number, line in enumerate(text.splitlines(), 1)
        if _PLACEHOLDER in line
    )


def diff_description(
    written: Mapping[str, Any], collected: Mapping[str, Any], *, name: str
) -> tuple[str, ...]:
    """Return the diff from the written to the collected values, empty if they agree.

    Values that cannot be collected are ignored.
    """
    return tuple(
        difflib.unified_diff(
            _dump(written).splitlines(),
            _dump(_overlay(written, collected)).splitlines(),
            fromfile=f"{name} as written",
            tofile=f"{name} as collected",
            lineterm="",
        )
    )


def _client(report: HostReport) -> dict[str, Any]:
    cpu, memory = report.cpu, report.memory_bytes
    return {
        "chassis": {
            "model_name": (report.dmi or {}).get("product_name") or None,
            "cpu_model": (cpu.model or None) if cpu else None,
            "cpu_qty": cpu.num_sockets if cpu else None,
            "cpu_cores": (cpu.num_physical or cpu.num_logical) if cpu else None,
            "memory_capacity": _round(memory / _GIB) if memory else None,
        },
        "networking": _ports(report.nics or ()) or None,
        "drives": _drives(report.drives or ()) or None,
        "operating_system": {"name": report.system, "version": report.kernel},
    }


def _ports(nics: Iterable[Nic]) -> list[dict[str, Any]]:
    counted = Counter((nic.kind, nic.state == "up", nic.speed_mbit_per_s) for nic in nics)
    return [
        {
            "unit_count": count,
            "type": kind,
            "state": "up" if is_up else "down",
            **({"speed": None if speed is None else _round(speed / 1000), "traffic": None} if is_up else {}),
        }
        for (kind, is_up, speed), count in counted.items()
    ]


def _drives(drives: Iterable[Drive]) -> list[dict[str, Any]]:
    counted = Counter(
        (
            drive.model,
            word if (word := drive.transport.lower()) in ("nvme", "sas", "sata") else "other",
            drive.is_rotational,
            drive.size_bytes // _GB,
        )
        for drive in drives
    )
    return [
        {
            "unit_count": count,
            "vendor_name": None,
            "model_name": model or None,
            "interface": interface,
            "media_type": "HDD" if is_rotational else None,
            "capacity_in_GB": capacity,
        }
        for (model, interface, is_rotational, capacity), count in counted.items()
        if capacity
    ]


def _overlay(written: Any, collected: Any) -> Any:
    """Return the written values, each replaced by the collected value if there is one."""
    if collected is None:
        return written
    if isinstance(collected, Mapping):
        below = written if isinstance(written, Mapping) else {}
        keys = [*below, *(key for key in collected if key not in below and collected[key] is not None)]
        return {key: _overlay(below.get(key), collected.get(key)) for key in keys}
    if isinstance(collected, Sequence) and not isinstance(collected, str):
        entries = written if isinstance(written, list) else []
        return [
            _overlay(entries[index] if index < len(entries) else None, entry)
            for index, entry in enumerate(collected)
        ]
    return written if written == collected else collected


def _round(value: float) -> float | int:
    rounded = float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def _dump(tree: Any) -> str:
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)
    return text
