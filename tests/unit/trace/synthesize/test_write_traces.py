"""Lines of each generation, and damage that touches what it names."""

import gzip
import json
from typing import Any

import pytest

from penstock.trace.synthesize.planned_calls import PlannedCall
from penstock.trace.synthesize.trace_description import FileDamage
from penstock.trace.synthesize.write_traces import RankProcess, damage_lines, is_event, pack, write_lines

CALLS = [
    PlannedCall(100, 5, "open64", "POSIX", 0, "/d/a", None, None, None),
    PlannedCall(105, 7, "write", "POSIX", 2, "/d/a", 4096, None, None),
    PlannedCall(112, 1, "fread", "STDIO", 0, "/d/b", 77, None, None),
    PlannedCall(100, 50, "Checkpoint.save", "checkpoint", 0, None, None, 1, 600),
]


def rows(generation: int) -> list[dict[str, Any]]:
    process = RankProcess(rank=3, host="node1", generation=generation)
    return [json.loads(line) for line in write_lines(CALLS, process)]


def test_the_first_generation_quotes_numbers_and_names_files_and_hosts() -> None:
    write = rows(1)[1]
    assert (write["ts"], write["dur"], write["ph"], write["pid"]) == ("105", "7", "X", "3")
    assert write["args"] == {"hostname": "node1", "ret": "4096", "count": "4096", "fname": "/d/a"}
    assert rows(1)[3]["args"] == {"hostname": "node1", "epoch": "1", "step": "600"}


def test_the_second_generation_has_integers_and_explains_each_hash_before_its_use() -> None:
    found = rows(2)
    assert [row["name"] for row in found] == ["HH", "FH", "open64", "write", "FH", "fread", "Checkpoint.save"]
    assert found[3]["args"]["fhash"] == found[1]["args"]["value"]
    assert found[5]["args"]["size"] == 1


def test_the_third_generation_has_integer_phases_and_hexadecimal_hashes() -> None:
    found = [row for row in rows(3) if row["ph"] == 1]
    assert [row["type"] for row in found] == [3, 3, 3, 6]
    assert len(found[0]["args"]["fhash"]) == 16
    assert found[3]["args"]["step"] == 600


@pytest.mark.parametrize("generation", [1, 2, 3])
def test_metadata_lines_are_distinguished_from_events(generation: int) -> None:
    lines = write_lines(CALLS, RankProcess(rank=0, host="h", generation=generation))
    assert sum(map(is_event, lines)) == len(CALLS)


def test_a_damage_touches_the_line_it_names() -> None:
    lines = [line.encode() for line in write_lines(CALLS, RankProcess(rank=0, host="h", generation=1))]
    for kind in ("control_characters", "bad_utf8", "cut_line", "garbage_line"):
        damaged = damage_lines(lines, [FileDamage.model_validate({"kind": kind, "line": 1})])
        assert [number for number in range(4) if damaged[number] != lines[number]] == [1], kind


def test_files_are_gzip_with_brackets_unless_damaged() -> None:
    def packed(*kinds: str) -> bytes:
        return pack([b"{}", b"{}"], [FileDamage.model_validate({"kind": kind}) for kind in kinds])

    assert gzip.decompress(packed()) == b"[\n{}\n{}\n]\n"
    assert gzip.decompress(packed("no_opening", "no_closing")) == b"{}\n{}\n"
    assert gzip.decompress(packed("two_members")) == b"[\n{}\n{}\n]\n"
    assert packed("plain_text") == b"[\n{}\n{}\n]\n"
    assert packed("empty_file") == b""
    with pytest.raises(EOFError):
        gzip.decompress(packed("truncated_gzip"))


def test_a_damaged_path_is_put_into_a_line_that_has_none() -> None:
    (damaged,) = damage_lines([b'{"args":{"ret":0}}'], [FileDamage(kind="control_characters")])
    assert damaged.startswith(b'{"args":{"fname":"\x01')
    (damaged,) = damage_lines([b'{"args":{"fname":"/a","ret":0}}'], [FileDamage(kind="bad_utf8")])
    assert damaged == b'{"args":{"fname":"/data/\xff\xfe\xc3","ret":0}}'
