"""When an unfinished save counts as dead."""

import json
from dataclasses import replace

import pytest

from penstock.checkpoint.commit.protocol import LEASE_S, is_lease_expired, lease_text
from penstock.storage.process_id import current_process

OLD_S, YOUNG_S = LEASE_S + 1, LEASE_S - 1


def test_a_living_process_keeps_its_save_however_old_it_is() -> None:
    me = current_process()
    assert not is_lease_expired(lease_text(me), age_s=OLD_S * 100, observer=me)


def test_a_dead_process_loses_its_save_at_once() -> None:
    me = current_process()
    reused = replace(me, started="1")
    assert is_lease_expired(lease_text(reused), age_s=0, observer=me)
    assert is_lease_expired(lease_text(replace(me, pid=2**22 + 1)), age_s=0, observer=me)


@pytest.mark.parametrize("elsewhere", [{"kernel": "another"}, {"numbering": "another"}, {"kernel": ""}])
def test_the_lease_of_a_remote_process_is_judged_by_age(elsewhere: dict[str, str]) -> None:
    me = current_process()
    lease = lease_text(replace(me, pid=2**22 + 1, **elsewhere))
    assert not is_lease_expired(lease, age_s=YOUNG_S, observer=me)
    assert is_lease_expired(lease, age_s=OLD_S, observer=me)


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"{}", b'{"owner": 7}', b'{"owner": {"pid": 1}}'])
def test_an_unparsable_lease_is_judged_by_its_age(text: bytes) -> None:
    assert not is_lease_expired(text, age_s=YOUNG_S, observer=current_process())
    assert is_lease_expired(text, age_s=OLD_S, observer=current_process())


def test_a_lease_names_its_owner_as_json() -> None:
    document = json.loads(lease_text(current_process()))
    assert document["owner"]["pid"] == current_process().pid
    assert document["owner"]["host"]
