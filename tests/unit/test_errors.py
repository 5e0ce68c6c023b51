"""The error tree: messages that say what, where and what to do; fields that travel between processes."""

import errno
import inspect
import pickle

import pytest

import penstock.errors as tree
from penstock.errors import (
    ObjectNotFound,
    PenstockError,
    RankFailed,
    ShortTransfer,
    StorageError,
    Unavailable,
    UsageError,
    WaitTimeout,
    name_some,
)

EXAMPLES: list[PenstockError] = [
    PenstockError("It broke"),
    UsageError("'4G' is ambiguous", fix="Say GiB."),
    Unavailable("No MPI", where="this host", fix="Install it."),
    StorageError("Cannot write", uri="file:///x", errno=errno.EIO),
    ObjectNotFound("No such object", uri="s3://b/k", fix="Check the key."),
    ShortTransfer("Half came", uri="mem://x", expected_bytes=10, actual_bytes=5),
    RankFailed(2, "node7", "disk full"),
    WaitTimeout("all ranks to finish writing", 30),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_survives_pickling_with_its_type_message_and_fields(error: PenstockError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_a_message_says_what_where_and_what_to_do() -> None:
    error = UsageError("Unknown option 'part'", where="s3://bucket", fix="Did you mean 'part_bytes'?")
    assert str(error) == "Unknown option 'part' (s3://bucket). Did you mean 'part_bytes'?"


def test_a_message_without_advice_is_just_the_fact() -> None:
    assert str(PenstockError("It broke")) == "It broke"
    assert str(PenstockError("Is it broken?", fix="Look.")) == "Is it broken? Look."


def test_errors_are_also_what_their_catchers_expect() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(ObjectNotFound, FileNotFoundError)
    assert issubclass(StorageError, OSError)
    assert issubclass(WaitTimeout, TimeoutError)


def test_a_storage_error_keeps_the_systems_errno() -> None:
    error = StorageError("Cannot write", uri="file:///x", errno=errno.EIO)
    assert error.errno == errno.EIO
    assert pickle.loads(pickle.dumps(error)).errno == errno.EIO


def test_the_docstring_draws_the_whole_tree() -> None:
    names = {
        name
        for name, kind in inspect.getmembers(tree, inspect.isclass)
        if issubclass(kind, PenstockError) and kind.__module__ == tree.__name__
    }
    drawn = tree.__doc__ or ""
    assert {name for name in names if name not in drawn} == set()


def test_exit_codes_tell_usage_and_environment_from_failure() -> None:
    assert (UsageError.exit_code, Unavailable.exit_code, StorageError.exit_code, RankFailed.exit_code) == (
        2,
        3,
        1,
        1,
    )


def test_long_list_of_names_is_cut_and_the_rest_counted() -> None:
    assert name_some([]) == ""
    assert name_some(["a", "b", "c"]) == "a, b, c"
    assert name_some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert name_some([1, 2, 3], 1, separator="; ") == "1 and 2 more"
    assert name_some(["x y", "z"], separator="; ") == "x y; z"
