"""Each format becomes the same columns, and what is wrong in a file is named with its place."""

import gzip
import json
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import UsageError
from penstock.kvcache.block_trace import BlockTrace
from penstock.kvcache.read_traces import read_trace


def written(folder: Path, *lines: dict[str, Any] | str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def line(timestamp: float = 0, tokens: int = 1000, blocks: tuple[int, ...] = (1, 2), **more: Any) -> Any:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 5, "hash_ids": blocks} | more


def blocks_of(trace: BlockTrace) -> list[list[int]]:
    return [part.tolist() for part in np.split(trace.block_ids, trace.first_block[1:-1])]


def test_a_trace_that_unpacks_to_much_more_than_its_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b'[{"conversations": "' + b"x" * (20 << 20)))
    tracemalloc.start()
    with pytest.raises(UsageError, match="unpacks to over 100 times its size"):
        read_trace(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_block_ids_with_the_same_hash_are_numbered_in_linear_time(tmp_path: Path) -> None:
    ids = [number * sys.hash_info.modulus for number in range(30_000)]
    path = written(tmp_path, {"chat_id": 1, **line(blocks=(*ids, ids[0]))})
    began_s = time.process_time()
    for kind in ("mooncake", "bailian"):
        assert len(set(read_trace(path, kind=kind).block_ids.tolist())) == 30_000 + (kind == "bailian")
    assert time.process_time() - began_s < 3  # by the square, 10 s and more


def test_mooncake_lines_and_their_other_names_are_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        line(timestamp=500, blocks=(70, 2**62)),
        {"created_time": 1500.5, "input_tokens": 1500.0, "output_tokens": 1, "hash_ids": [70, 2**62, 9]},
    )
    trace = read_trace(path)
    assert blocks_of(trace) == [[0, 1], [0, 1, 2]]
    assert trace.arrival_s.tolist() == [0, 1.0005]
    assert trace.input_tokens.tolist() == [1000, 1500]
    assert (trace.block_tokens, trace.notes) == (512, ())


def test_hash_ids_may_be_texts_and_numbers_beyond_64_bits(tmp_path: Path) -> None:
    path = written(tmp_path, line(blocks=("a", 2**80)), line(1, blocks=("a", "b")))  # type: ignore[arg-type]
    assert blocks_of(read_trace(path)) == [[0, 1], [0, 2]]


def test_size_of_a_block_is_what_the_requests_say(tmp_path: Path) -> None:
    path = written(tmp_path, line(tokens=130, blocks=(1, 2, 3)), line(1, tokens=64, blocks=(4,)))
    assert read_trace(path).block_tokens == 64
    odd = written(tmp_path, line(tokens=201, blocks=(1, 2, 3)), line(1, tokens=66, blocks=(4,)))
    assert read_trace(odd).block_tokens == 67


def test_requests_with_other_numbers_of_blocks_are_noted(tmp_path: Path) -> None:
    path = written(tmp_path, *(line(index, 1000, (index, 99)) for index in range(5)), line(9, 1000, (1,)))
    note, *_ = read_trace(path).notes
    assert "1 of 6 requests" in note
    assert "lines 6" in note


def test_blocks_of_bailian_are_told_apart_by_what_stands_before_them(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        line(2.5, 32, (7, 8), chat_id=1, parent_chat_id=-1),
        line(4.5, 32, (9, 8), chat_id=2, parent_chat_id=-1),
        line(5.5, 32, (7, 8), chat_id=3, parent_chat_id=1),
    )
    trace = read_trace(path)
    assert blocks_of(trace) == [[0, 1], [2, 3], [0, 1]]
    assert trace.arrival_s.tolist() == [0, 2, 3]
    assert trace.block_tokens == 16


def test_sessions_without_times_follow_their_delays(tmp_path: Path) -> None:
    first = {"session_id": "a", "input_length": 512, "output_length": 1, "hash_ids": [1], "timestamp": 100}
    following = {"session_id": "a", "input_length": 512, "output_length": 1, "hash_ids": [1], "delay": 250}
    assert read_trace(written(tmp_path, first, following)).arrival_s.tolist() == [0, 0.25]


def test_requests_are_sorted_by_time_with_a_note(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, line(2000, blocks=(5, 6)), line(1000, blocks=(7, 6))))
    assert blocks_of(trace) == [[0, 1], [2, 1]]
    assert "sorted" in trace.notes[0]


def test_burstgpt_has_no_common_blocks(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,600,18,618,Conversation log",
        "45,GPT-4,100,0,100,API log",
        name="b.csv",
    )
    trace = read_trace(path)
    assert blocks_of(trace) == [[0, 1], [2]]
    assert trace.arrival_s.tolist() == [0, 40]


@pytest.mark.parametrize("rows", [["0,100000000000,1"], ["0,8e9,1", "1,8e9,1"]])
def test_a_table_that_claims_too_many_blocks_is_refused_by_its_line(tmp_path: Path, rows: list[str]) -> None:
    path = written(tmp_path, "Timestamp,Request tokens,Response tokens", *rows, name="b.csv")
    with pytest.raises(UsageError, match=rf"blocks, which is too many .*b\.csv:{len(rows) + 1}\)"):
        read_trace(path)


@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_azures_traces_have_dates_instead_of_times(tmp_path: Path, zone: str) -> None:
    path = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        f"2023-11-16 18:17:03.9799600{zone},4808,10",
        f"2023-11-16 18:17:04.2299600{zone},318,8",
        name="a.csv",
    )
    trace = read_trace(path)
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([4808, 318], [10, 8])
    assert trace.arrival_s.tolist() == pytest.approx([0, 0.25])
    with pytest.raises(UsageError, match="timestamp is 'yesterday'"):
        read_trace(
            written(tmp_path, "Timestamp,Request tokens,Response tokens", "yesterday,1,1", name="b.csv")
        )


def test_turns_of_sharegpt_share_whole_blocks(tmp_path: Path) -> None:
    turns = [("human", 16 * 4 + 4), ("gpt", 80), ("human", 4), ("gpt", 8)]
    talk = {"id": "x", "conversations": [{"from": who, "value": "x" * size} for who, size in turns]}
    path = written(tmp_path, json.dumps([talk]), name="s.json")
    trace = read_trace(path, block_tokens=16)
    assert trace.input_tokens.tolist() == [17, 38]
    assert blocks_of(trace) == [[0, 1], [0, 2, 3]]


def test_texts_that_look_like_one_number_stay_apart(tmp_path: Path) -> None:
    path = written(tmp_path, line(blocks=("7", "07")), line(1, blocks=(7, "7")))  # type: ignore[arg-type]
    assert blocks_of(read_trace(path)) == [[0, 1], [2, 0]]


def test_requests_may_list_full_blocks_alone_and_no_length_of_the_answer(tmp_path: Path) -> None:
    short = {"timestamp": 5, "input_tokens": 15, "hash_ids": []}
    trace = read_trace(written(tmp_path, line(tokens=47, blocks=(1, 2)), short))
    assert (trace.block_tokens, trace.blocks_of_requests.tolist()) == (16, [2, 0])
    [note] = trace.notes
    assert "1 of 2 requests do not say how long their outputs are" in note
    assert "lines 2" in note


def test_ids_that_follow_different_blocks_are_noted(tmp_path: Path) -> None:
    [note] = read_trace(written(tmp_path, line(blocks=(1, 3)), line(1, blocks=(2, 3)))).notes
    assert "1 of 3 ids follow different blocks" in note


def dynamo(timestamp: int, hashes: list[int], **more: Any) -> dict[str, Any]:
    replay = {"trace_block_size": 16, "input_length": 16 * len(hashes), "input_sequence_hashes": hashes}
    request = {"request_received_ms": timestamp, "output_tokens": 3, "replay": replay} | more
    return {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request}


def test_records_of_dynamo_are_read_past_those_of_tools(tmp_path: Path) -> None:
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {}}
    large = 2**64 - 1
    path = written(tmp_path, dynamo(9000, [large, 5]), tool, {"event": dynamo(9500, [large, 6])})
    trace = read_trace(path)
    assert blocks_of(trace) == [[0, 1], [0, 2]]
    assert (trace.block_tokens, trace.arrival_s.tolist()) == (16, [0, 0.5])
    with pytest.raises(UsageError, match="does not say which blocks"):
        read_trace(written(tmp_path, dynamo(1, [1], replay=None)))


def test_conversations_of_weka_count_their_own_blocks(tmp_path: Path) -> None:
    inner = {"t": 4, "type": "subagent", "requests": [{"t": 1, "in": 64, "out": 1, "hash_ids": [8]}]}
    turns = [{"t": 0, "in": 128, "out": 1, "hash_ids": [1, 2]}, inner]
    talk = {"id": "a", "block_size": 64, "requests": turns}
    other = {"id": "b", "block_size": 64, "requests": [{"t": 2, "in": 100, "out": 1, "hash_ids": [1, 2]}]}
    trace = read_trace(written(tmp_path, talk, other))
    assert blocks_of(trace) == [[0, 1], [2, 3], [4]]
    assert (trace.block_tokens, trace.arrival_s.tolist()) == (64, [0, 2, 5])
    with pytest.raises(UsageError, match="64 and 128 tokens in one trace"):
        read_trace(written(tmp_path, talk, other | {"block_size": 128}))


@pytest.mark.parametrize("form", ["lines", "gzip", "list", "mark"])
def test_lines_may_be_packed_or_one_list(tmp_path: Path, form: str) -> None:
    requests = [line(), line(1)]
    text = json.dumps(requests, indent=1) if form == "list" else "\r\n".join(map(json.dumps, requests))
    content = (b"\xef\xbb\xbf" if form == "mark" else b"") + text.encode()
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(content) if form == "gzip" else content)
    assert blocks_of(read_trace(path)) == [[0, 1], [0, 1]]


def test_packed_files_that_are_not_read_name_what_unpacks_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(UsageError, match="packed") as raised:
        read_trace(path)
    assert "zstd -d" in str(raised.value.fix)
    path.write_bytes(b"PAR1" + bytes(range(200, 220)))
    with pytest.raises(UsageError, match="packed"):
        read_trace(path)
    path.write_bytes(gzip.compress(json.dumps(line()).encode())[:-9])
    with pytest.raises(UsageError, match="Cannot read"):
        read_trace(path)


@pytest.mark.parametrize(
    ("wrong", "place", "what"),
    [
        pytest.param('{"timestamp": 1,', "trace.jsonl:2", "not JSON", id="cut"),
        pytest.param("[1]", "trace.jsonl:2", "not a JSON object", id="list"),
        pytest.param(line(blocks=(1.5,)), "trace.jsonl:2: hash_ids", "hash_ids is [1.5]", id="ids"),  # type: ignore[arg-type]
        pytest.param(line(tokens=-1), "trace.jsonl:2: input_length", "input_length is -1", id="negative"),
        pytest.param(line(timestamp=float("nan")), "trace.jsonl:2: timestamp", "is nan", id="time"),
        pytest.param({"timestamp": 0}, "trace.jsonl:2: hash_ids", "hash_ids is missing", id="missing"),
        pytest.param(line(input_length="x"), "2: input_length", "input_length is 'x'", id="text"),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_field(
    tmp_path: Path, wrong: Any, place: str, what: str
) -> None:
    path = written(tmp_path, line(), wrong)
    with pytest.raises(UsageError) as raised:
        read_trace(path)
    assert place in raised.value.where
    assert what in raised.value.what
    assert raised.value.fix


@pytest.mark.parametrize("text", ["", "hello\n", "a,b\n1,2\n"], ids=["empty", "text", "csv"])
def test_files_that_are_no_traces_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        read_trace(path)
    assert str(path) in str(raised.value)


def test_chunks_are_parts_or_groups_of_blocks(tmp_path: Path) -> None:
    path = written(tmp_path, line(tokens=1000, blocks=(1, 2)), line(1, tokens=1400, blocks=(1, 2, 3)))
    trace = read_trace(path)
    halves = trace.with_chunks_of(256)
    assert blocks_of(halves) == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert blocks_of(trace.with_chunks_of(1024)) == [[0], [0, 1]]
    with pytest.raises(UsageError, match="cannot be cut"):
        trace.with_chunks_of(384)
    assert trace.head(1).num_blocks == 2
