"""What lies there against what ranks wrote."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.formats.description import require_complete
from penstock.errors import ShortTransfer, StorageError

FILES = st.dictionaries(st.text("ab_0", min_size=1, max_size=4), st.integers(0, 9), max_size=6)


@given(FILES, FILES)
def test_only_exactly_the_written_files_are_complete(found: dict[str, int], expected: dict[str, int]) -> None:
    if found == expected:
        require_complete(found, expected, "file:///run")
    else:
        with pytest.raises(StorageError):
            require_complete(found, expected, "file:///run")


def test_errors_name_wrong_files_and_their_likely_cause() -> None:
    sizes = {f"__{rank}_0.distcp": 10 for rank in range(5)}
    with pytest.raises(
        StorageError, match=r"4 of 5 files .* missing.*__1_0.distcp.* and 1 more.*shared file"
    ):
        require_complete({"__0_0.distcp": 10}, sizes, "file:///run")
    with pytest.raises(ShortTransfer, match=r"__3_0\.distcp has 4 bytes, but 10 were written") as caught:
        require_complete({**sizes, "__3_0.distcp": 4}, sizes, "file:///run")
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (10, 4)
    with pytest.raises(StorageError, match="contains 1 files that no rank wrote: notes"):
        require_complete({**sizes, "notes": 1}, sizes, "file:///run")
