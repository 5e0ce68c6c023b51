"""What a journal says after kills, in any order of lines, torn or long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest  # noqa: TC002 - hypothesis looks at the annotations
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.levels.flush.flush_folder import (
    Journal,
    JournalEntry,
    JournalReader,
    SaveState,
    parse_entries,
    replay,
)

if TYPE_CHECKING:
    from pathlib import Path

SAVE = "0123456789abcdef"
SUM = "f" * 32


def line(what: str, step: int = 1, **fields: object) -> JournalEntry:
    return JournalEntry.model_validate({"at_s": 5.0, "what": what, "step": step, "save_id": SAVE, **fields})


lines = st.builds(
    line,
    st.sampled_from(["begun", "copied", "marked", "failed", "durable", "superseded"]),
    st.integers(1, 3),
    file=st.sampled_from(["a", "b"]),
    size_bytes=st.integers(0, 9),
    reason=st.sampled_from(["", "no space"]),
)


@given(st.lists(lines, max_size=12), st.integers(0, 400))
def test_a_truncated_journal_counts_its_complete_lines(
    tmp_path_factory: pytest.TempPathFactory, written: list[JournalEntry], cut: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal(path)
    for each in written:
        journal.write(each)
    journal.close()
    content = path.read_bytes()
    path.write_bytes(content[: max(len(content) - cut, 0)])
    left = path.read_bytes()
    whole = parse_entries(left[: left.rfind(b"\n") + 1])
    assert whole == written[: len(whole)]
    # Opened again, it takes lines after the cut, and readers see the same as the writer.
    again = Journal(path)
    assert again.states == replay(whole)
    again.write(line("marked", step=9))
    assert again.states == JournalReader(path).states() == replay([line("marked", step=9)], replay(whole))
    again.close()


@given(st.lists(lines, max_size=12), st.integers(0, 12))
def test_a_reader_of_a_growing_journal_sees_complete_lines(
    tmp_path_factory: pytest.TempPathFactory, written: list[JournalEntry], first: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    reader = JournalReader(path)
    assert reader.states() == {}
    journal = Journal(path)
    for each in written[:first]:
        journal.write(each)
    assert reader.states() == replay(written[:first])
    for each in written[first:]:
        journal.write(each)
    journal.close()
    assert reader.states() == replay(written)


def test_a_long_journal_is_rewritten_with_the_entries_still_needed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for step in range(1, 5):
        journal.write(line("copied", step=step, file="a", sum=SUM))
        journal.write(line("durable", step=step))
    journal.write(line("copied", step=5, file="a", size_bytes=7, sum=SUM))
    journal.close()
    reader = JournalReader(path)
    before = reader.states()
    again = Journal(path, longest_bytes=10)
    again.close()
    after = reader.states()
    assert [standing.outcome for standing in after.values()] == [each.outcome for each in before.values()]
    assert after[5, SAVE].copied_bytes == 7
    assert after[1, SAVE].copied == {}
    assert path.read_bytes().count(b"\n") == 5


def test_progress_ends_a_series_of_failures() -> None:
    failed = [line("failed", reason="no space"), line("failed", reason="no space")]
    assert replay(failed)[1, SAVE].num_failures == 2
    assert replay([*failed, line("copied", file="a")])[1, SAVE] == SaveState(
        step=1, copied={"a": line("copied", file="a")}, failing_since_s=5.0
    )
