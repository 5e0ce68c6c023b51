"""Names of files travel as few bytes and come back as they were."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.loading.shared_opening import pack_names, unpack_names

NUMBERED = st.from_regex(r"\A_{0,2}[0-9]{1,25}(_|-|\.)[0-9]{0,4}[^0-9]?\Z")


@given(st.lists(st.text() | NUMBERED))
def test_packed_names_come_back(names: list[str]) -> None:
    assert unpack_names(pack_names(names)) == tuple(names)


def test_names_of_a_large_job_are_a_few_hundred_bytes() -> None:
    names = [f"__{rank}_{number}.distcp" for rank in range(4096) for number in range(2)]
    packed = pack_names(names)
    assert unpack_names(packed) == tuple(names)
    assert len(packed) < 500
