"""Values from a command line: the same grammar for --set and for DLIO's words, and a round trip."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.workload.settings import (
    format_value,
    parse_dlio_words,
    parse_settings,
    parse_value,
)

KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(
        ["null", "True", "1", "1.5", "4MiB", "off", "a,b", "it's", 'say "x"', "\\", "", " x ", "[1]"]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-1", -1),
        ("1_000", 1000),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1e-3", 0.001),
        ("true", True),
        ("False", False),
        ("NULL", None),
        ("off", "off"),
        ("4MiB", "4MiB"),
        ("250ms", "250ms"),
        ("", ""),
        ("''", ""),
        ("'42'", "42"),
        ('"a,b"', "a,b"),
        (r"'it\'s'", "it's"),
        (r"'a\b'", r"a\b"),
        ("/data/x:y=z", "/data/x:y=z"),
        (" [1, 2.5,x , 'y z'] ", [1, 2.5, "x", "y z"]),
        ("[]", []),
        ("[1,]", [1]),
        ("{}", {}),
        ("{mean:1,stdev:0.1}", {"mean": 1, "stdev": 0.1}),
        ("{mean: 500ms, 'a b': [x, {c: null}]}", {"mean": "500ms", "a b": ["x", {"c": None}]}),
    ],
)
def test_a_value_is_read_as_dlios_users_write_it(text: str, value: Any) -> None:
    read = parse_value(text, source="--set")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1,2", "several values"),
        ("[1", "no ']'"),
        ("[1 2", "no ']'"),
        ("[1,", "an empty value"),
        ("{a", "no ':' after 'a'"),
        ("{a}", "no ':' after 'a'"),
        ("{a:1", "no '}'"),
        ("{'a' 1}", "no ':' after 'a'"),
        ("'x", "no closing '"),
        ("'x' y", "text after the value: 'y'"),
        ("[1]]", "text after the value"),
        ("[,]", "an empty value"),
        ("{a:}", "an empty value"),
    ],
)
def test_a_broken_value_says_where_it_breaks(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_value(text, source="--set a.b=...")
    assert said in str(caught.value)
    assert "--set a.b=..." in str(caught.value)
    assert caught.value.fix


@given(VALUES)
def test_a_formatted_value_is_read_as_itself(value: Any) -> None:
    assert parse_value(format_value(value), source="") == value


@given(st.lists(KEYS, min_size=1, max_size=4), VALUES)
def test_a_formatted_setting_and_dlios_word_give_the_same_path_and_value(path: list[str], value: Any) -> None:
    text = f"{'.'.join(path)}={format_value(value)}"
    (ours,) = parse_settings([text])
    ((theirs,), _) = parse_dlio_words([f"++workload.{text}"])
    assert (ours.path, ours.value) == (theirs.path, theirs.value) == (tuple(path), value)


def test_an_override_is_a_tree_with_one_leaf() -> None:
    (override,) = parse_settings(["dataset.parquet.row_group_size=10"])
    assert override.tree() == {"dataset": {"parquet": {"row_group_size": 10}}}
    assert override.source == "--set dataset.parquet.row_group_size=10"


@pytest.mark.parametrize("text", ["novalue", "=1", "a..b=1", "a b=1", "1a=2", ".a=1"])
def test_what_sets_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings([text])
    assert "SECTION.KEY=VALUE" in str(caught.value)


def test_dlios_whole_command_line_is_understood() -> None:
    overrides, words = parse_dlio_words(
        [
            "workload=unet3d_h100",
            "++workload.dataset.num_files_train=42",
            "+workload.train.computation_time={mean:1,stdev:0.1}",
            "workload.reader.file_shuffle=off",
            "++hydra.run.dir=/results/a b",
            "hydra.output_subdir=dlio_config",
            "--config-dir",
            "/my, configs",
        ]
    )
    assert words == {
        "workload": "unet3d_h100",
        "--config-dir": "/my, configs",
        "hydra.run.dir": "/results/a b",
        "hydra.output_subdir": "dlio_config",
    }
    assert [(override.path, override.value) for override in overrides] == [
        (("dataset", "num_files_train"), 42),
        (("train", "computation_time"), {"mean": 1, "stdev": 0.1}),
        (("reader", "file_shuffle"), "off"),
    ]


@pytest.mark.parametrize("words", [["--config-dir=/x"], ["-cd", "/x"], ["--config-dir", "/x"]])
def test_the_folder_of_configurations_has_three_spellings(words: list[str]) -> None:
    assert parse_dlio_words(words) == ((), {"--config-dir": "/x"})


def test_a_tilde_leaves_a_key_at_its_default() -> None:
    ((left_out,), _) = parse_dlio_words(["~workload.dataset.compression"])
    assert (left_out.path, left_out.value) == (("dataset", "compression"), None)


def test_a_folder_is_taken_literally_and_a_null_is_told_from_silence() -> None:
    _, words = parse_dlio_words(["--config-dir=/a,b 'c'", "hydra.output_subdir=null", "workload=2024"])
    assert words == {"--config-dir": "/a,b 'c'", "hydra.output_subdir": "", "workload": "2024"}


def test_a_secret_is_kept_out_of_what_messages_quote() -> None:
    (override,) = parse_settings(["storage.storage_options.secret_access_key=hush"])
    assert override.value == "hush"
    assert "hush" not in override.source
    assert parse_settings(["storage.storage_options.access_key_id="])[0].source.endswith("access_key_id=...")
    with pytest.raises(UsageError) as caught:
        parse_settings(["storage.storage_options.secret_access_key=hush,hush"])
    assert "hush" not in str(caught.value)
    assert "Put it in quotes" in str(caught.value)


def test_no_words_ask_for_nothing() -> None:
    assert parse_dlio_words([]) == ((), {})


@pytest.mark.parametrize(
    "word",
    ["unet3d", "-m", "--multirun=1", "~workload.dataset.format=1", "hydra.job.name=x", "dataset.format=npz"],
)
def test_words_outside_of_the_subset_are_refused_with_the_subset(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_dlio_words([word])
    assert word in str(caught.value)
    assert "++workload.SECTION.KEY=VALUE" in caught.value.fix


def test_a_folder_that_is_not_named_is_missed() -> None:
    with pytest.raises(UsageError, match="--config-dir names no folder"):
        parse_dlio_words(["workload=x", "--config-dir"])
