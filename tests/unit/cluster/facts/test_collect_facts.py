"""The facts of some hosts never pass for those of all."""

import json
import pickle
from pathlib import Path

import pytest
from tests.unit.cluster.facts.known_hosts import answer, cluster, present, report

from penstock.cluster.facts.collect_facts import AgentOutput, collect_from_hosts, parse_agent_output
from penstock.cluster.facts.host_facts import (
    AbsentHost,
    ClusterFacts,
    HostReport,
    PresentHost,
    Via,
    extract_document,
    frame_document,
    parse_facts,
    read_cluster_facts,
)
from penstock.errors import DataDamaged, HostsAbsent, ObjectNotFound

VIA: Via = "mpi"
AT = "2026-01-02T03:04:05+00:00"


def _gather(*answers: AgentOutput, hosts: str = "a,b,c,d", allow_partial: bool = False) -> ClusterFacts:
    return collect_from_hosts(
        reversed(answers),
        hosts.split(","),
        via=VIA,
        timeout_s=9,
        collected_at=AT,
        allow_partial=allow_partial,
    )


BROKEN = (
    answer("b", exit_code=255, stderr="Warning: x\nssh: no route to host\n"),
    answer("c", exit_code=None),
    answer("d", stdout="Welcome!\n<<penstock-facts\n{..."),
)


def test_hosts_keep_the_order_of_the_query() -> None:
    facts = _gather(*(answer(host) for host in "abcd"))
    assert [each.host for each in facts.present] == ["a", "b", "c", "d"]
    assert not facts.is_partial


def test_a_dead_a_hanging_and_a_garbled_host_are_each_named_with_what_became_of_them() -> None:
    with pytest.raises(HostsAbsent) as caught:
        _gather(answer("a"), *BROKEN)
    assert caught.value.reported == ("a",)
    assert caught.value.absent.keys() == {"b", "c", "d"}
    assert caught.value.absent["b"] == "exit code 255, with the output: Warning: x ... ssh: no route to host"
    assert caught.value.absent["c"] == "no response within 9 s"
    assert caught.value.absent["d"].startswith("no facts in its output: 'Welcome!")
    assert "3 of 4 hosts" in str(caught.value)
    assert "reported: a" in str(caught.value)


def test_the_error_survives_its_way_to_other_processes() -> None:
    error = HostsAbsent(("a",), {"b": "exit code 1"})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reported, again.absent) == (str(error), ("a",), {"b": "exit code 1"})


def test_what_there_is_can_be_kept_and_is_marked() -> None:
    facts = _gather(answer("a"), *BROKEN, allow_partial=True)
    assert facts.is_partial
    assert [each.host for each in facts.present] == ["a"]
    assert [each.host for each in facts.absent] == ["b", "c", "d"]
    assert facts.absent[0].stderr.endswith("no route to host")


def test_memory_is_a_sum_over_hosts_and_unknown_where_one_is() -> None:
    hosts = (present("a"), present("b", memory_bytes=1 << 30))
    assert cluster(*hosts).memory_bytes == (512 << 30) + (1 << 30)
    assert cluster(*hosts, present("c", memory_bytes=None)).memory_bytes is None
    assert _gather(answer("a"), *BROKEN, allow_partial=True).memory_bytes is None


def test_nothing_at_all_is_not_a_part() -> None:
    with pytest.raises(HostsAbsent, match="reported: none"):
        _gather(*BROKEN, hosts="b,c,d", allow_partial=True)


def test_a_whole_document_does_not_excuse_a_launcher_that_failed() -> None:
    seen = parse_agent_output(answer("a", exit_code=1), timeout_s=9)
    assert isinstance(seen, AbsentHost)
    assert seen.reason == "exit code 1"


def test_of_many_words_the_first_and_the_last_are_kept() -> None:
    words = "cause\n" + "x" * 100_000 + "\nend"
    seen = parse_agent_output(answer("a", exit_code=1, stderr=words), timeout_s=9)
    assert isinstance(seen, AbsentHost)
    assert seen.stderr.startswith("cause\n")
    assert seen.stderr.endswith("\nend")
    assert len(seen.stderr) < 5_000


def test_what_shells_print_around_the_facts_does_no_harm() -> None:
    said = f"motd\n{frame_document(report('a').model_dump_json())}bye\n"
    assert isinstance(parse_agent_output(answer("a", stdout=said), timeout_s=9), PresentHost)


@pytest.mark.parametrize("said", ["", frame_document("x")[:-20], "penstock-facts>>", "<<penstock-facts\n"])
def test_a_frame_without_its_end_holds_nothing(said: str) -> None:
    assert extract_document(said) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"memory_bytes": "512"}, "memory_bytes"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"memroy": 1}, "memroy"),
        ({"cpu": {"model": "x"}}, "cpu.machine"),
    ],
)
def test_facts_of_another_shape_are_refused_by_name(change: dict[str, object], named: str) -> None:
    document = json.dumps({**report("a").model_dump(mode="json"), **change})
    seen = parse_agent_output(answer("a", stdout=frame_document(document)), timeout_s=9)
    assert isinstance(seen, AbsentHost)
    assert f"unreadable facts: This version of Penstock cannot read these facts: {named}" in seen.reason


def test_a_missing_fact_has_no_default() -> None:
    document = report("a").model_dump(mode="json")
    del document["memory_bytes"]
    with pytest.raises(DataDamaged, match=r"memory_bytes: Field required"):
        parse_facts(HostReport, json.dumps(document), where="a")


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    facts = _gather(answer("a"), *BROKEN, allow_partial=True)
    (tmp_path / "cluster.json").write_text(facts.model_dump_json(indent=2))
    assert read_cluster_facts(tmp_path / "cluster.json") == facts


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"is_partial": True}, {"asked": ["a", "z"]}, {"asked": []}, {"present": []}],
)
def test_a_file_that_does_not_account_for_every_host_is_refused(change: dict[str, object]) -> None:
    document = {**cluster(present("a")).model_dump(mode="json"), **change}
    with pytest.raises(DataDamaged, match="Collect them again"):
        parse_facts(ClusterFacts, json.dumps(document), where="cluster.json")


def test_a_missing_facts_file_error_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="penstock cluster collect"):
        read_cluster_facts(tmp_path / "cluster.json")
