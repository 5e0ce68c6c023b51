"""The schema of a description: what published ones have, and what is wrong in others."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.submission.timed_tree import valid_training

from penstock.submission.parsed_file import read_description
from penstock.submission.system_description import (
    find_schema_problems,
    itemized_rack_units,
    provisioned_watts,
)

PUBLISHED = Path(os.environ.get("PENSTOCK_MLPERF_RESULTS", "/nowhere"))
Change = Callable[[dict[str, Any]], object]


def problems(folder: Path, change: Change) -> list[str]:
    system = valid_training("v3.0", num_runs=2).system()
    change(system)
    path = folder / "fast.yaml"
    path.write_text(yaml.safe_dump({"system_under_test": system}, sort_keys=False))
    return [
        f"{'accepted' if problem.is_accepted else 'wrong'} "
        f"{problem.path.removeprefix('system_under_test.')}: {problem.text}"
        for problem in find_schema_problems(read_description(path, folder))
    ]


def solution(**values: object) -> Change:
    return lambda system: system["solution"].update(values)


def node(**values: object) -> Change:
    return lambda system: system["product_nodes"][0]["chassis"].update(values)


def rent(system: dict[str, Any]) -> None:
    system["deployment"] = "cloud"
    del system["total_rack_units"], system["product_nodes"]


SWITCH = {
    "unit_count": 2,
    "vendor_name": "V",
    "model_name": "M",
    "ports": [{"unit_count": 64}],
    "rack_units": 1,
}
DRIVE = {
    "unit_count": 1,
    "vendor_name": "V",
    "model_name": "M",
    "interface": "SATA",
    "media_type": "TLC",
    "capacity_in_GB": 960,
    "serial": "x",
}


@pytest.mark.parametrize(
    "change",
    [
        solution(int_client_store_tib=3.5),
        solution(usable_capacity_tib="262.67", availability="RDI"),
        solution(availability="preview"),
        node(cpu_qty="2", memory_capacity="512"),
        lambda system: system.update(product_switches=[SWITCH], total_rack_units=6),
        lambda system: system["clients"][0].update(drives=[DRIVE], sysctl=[]),
        rent,
    ],
    ids=["client store", "quoted numbers", "preview", "quoted counts", "switches", "drives", "cloud"],
)
def test_what_published_descriptions_have_is_no_problem(change: Change, tmp_path: Path) -> None:
    assert problems(tmp_path, change) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda system: system["solution"].pop("availability"),
            "wrong solution.availability: Field required",
        ),
        (
            lambda system: system["solution"].pop("usable_capacity_tib"),
            "wrong solution.usable_capacity_tib: Field required",
        ),
        (
            solution(availability="soon"),
            "wrong solution.availability: Input should be 'available', 'preview' or 'RDI'",
        ),
        (
            solution(usable_capacity_tib=0.5),
            "wrong solution.usable_capacity_tib: Input should be greater than or equal to 1",
        ),
        (
            lambda system: (system.pop("product_nodes"), system.update(total_rack_units=0)),
            (
                "wrong product_nodes: required on premises where storage_location is remote: rack units "
                "and power come from it"
            ),
        ),
        (node(cpu_qty="two"), "wrong product_nodes.0.chassis.cpu_qty: Input should be a valid integer"),
        (
            node(cpu_qty=None),
            (
                "accepted product_nodes.0.chassis.cpu_qty: null, which is accepted for hardware that is not "
                "a server"
            ),
        ),
        (
            lambda system: system["clients"][0]["chassis"].update(cpu_qty=None),
            "wrong clients.0.chassis.cpu_qty: fill in a valid integer",
        ),
        (
            lambda system: system.update(total_rack_units=7),
            "accepted total_rack_units: 7, but the product's nodes and switches take 4",
        ),
        (
            lambda system: system["solution"]["architecture"].update(client_footprint="n/a"),
            (
                "wrong solution.architecture: client_footprint and client_installation are both n/a, or "
                "neither is"
            ),
        ),
        (
            lambda system: system["solution"]["capabilities"].update(remap_time_in_seconds=30),
            (
                "wrong solution.capabilities: remap_time_in_seconds is 0 with simultaneous_write and "
                "simultaneous_read, and more without"
            ),
        ),
        (
            lambda system: system["product_nodes"][0]["chassis"]["power"].update(min_psus_active=3),
            "wrong product_nodes.0.chassis.power: 3 supplies are active, of 2 that are configured",
        ),
    ],
)
def test_what_is_wrong_is_named(change: Change, expected: str, tmp_path: Path) -> None:
    assert problems(tmp_path, change) == [expected]


def described(folder: Path, change: Change) -> tuple[float | None, float | None]:
    problems(folder, change)
    description = read_description(folder / "fast.yaml", folder)
    return provisioned_watts(description), itemized_rack_units(description)


def test_power_is_that_of_all_supplies_of_nodes_and_switches(tmp_path: Path) -> None:
    powered = {
        **SWITCH,
        "power": {"psus_configured": [{"unit_count": 2, "nameplate_power_watts": "300"}]},
    }
    assert described(tmp_path, lambda _: None) == (6400, 4)
    assert described(tmp_path, lambda system: system.update(product_switches=[powered])) == (7600, 6)


def test_power_is_blank_in_the_cloud_and_inside_of_clients(tmp_path: Path) -> None:
    assert described(tmp_path, lambda system: system.update(deployment="cloud"))[0] is None
    local: Change = lambda system: system["solution"]["architecture"].update(storage_location="local")  # noqa: E731
    assert described(tmp_path, local)[0] is None
    assert described(tmp_path, rent) == (None, None)


@pytest.mark.skipif(
    not (PUBLISHED / "published.csv").is_file(),
    reason="PENSTOCK_MLPERF_RESULTS names no results of v3.0",
)
def test_published_descriptions_have_the_problems_that_hold_in_them() -> None:
    found = {
        path.parent.parent.name: [
            problem.path.removeprefix("system_under_test.")
            for problem in find_schema_problems(read_description(path, PUBLISHED))
        ]
        for path in PUBLISHED.glob("closed/*/systems/*.yaml")
    }
    custom = [
        f"product_nodes.{group}.chassis.{name}"
        for group in (0, 1)
        for name in ("cpu_model", "cpu_qty", "cpu_cores", "memory_capacity")
    ]
    assert found == {
        "Everpure": custom,
        "TuringData": ["total_rack_units"],
        **{name: [] for name in ("Alluxio", "HPE", "NVIDIA", "TTA", "ZettaLane")},
    }
