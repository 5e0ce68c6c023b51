"""The option layer: declarations become parameters, help, completion, and the arguments of a function."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

import penstock
from penstock.cli.app import app, main
from penstock.cli.options import (
    Group,
    Verb,
    argument,
    arguments,
    command_line,
    declarations,
    fill,
    flag,
    group,
    option,
    optional_argument,
    options_of,
    repeated,
    required,
    switch,
    verb,
)
from penstock.cli.parsers import ASSIGNMENT, FILE, SIZE, TEXT, choice, whole
from penstock.cli.terminal import Terminal
from penstock.errors import Unavailable, UsageError


@dataclass(frozen=True, kw_only=True)
class Inner:
    pairs: tuple[tuple[str, str], ...] = repeated("--option", ASSIGNMENT, "Set an option.", short="-o")
    size_bytes: int = option("--size", SIZE, "Bytes to move.", default="2KiB")


SEED: int | None = option("--seed", whole(), "Seed.")
CALLS: list[dict[str, Any]] = []


@verb
def work(  # noqa: PLR0913 - as many as there are ways to declare one
    terminal: Terminal,
    *,
    name: str = argument("NAME", TEXT, "What it is called."),
    files: tuple[Path, ...] = arguments("[FILES...]", FILE, "Files to read.", is_required=False),
    count: int = required("--count", whole(1), "How many."),
    seed: int | None = SEED,
    colour: str = option("--colour", choice("red", "blue"), "Colour.", default="red"),
    fsync: bool | None = switch("--fsync", "Make it durable."),
    is_dry: bool = flag("--dry-run", "Change nothing."),
    depth: int = option("--depth", whole(1), "Levels.", default="2", panel="More"),
    inner: Inner = group(Inner, panel="Inner options"),
    memo: str = "no option",
) -> int:
    """Do some work, and say so.

    It takes two paragraphs
    to explain.

    Examples:

      work a --count 1

      work a --count 2 \
        --dry-run
    """
    given = dict(locals())
    CALLS.append({name: given[name] for name in given if name != "terminal"})
    terminal.result({"name": name}, [name])
    return count - 1


USUAL = {
    "name": "a",
    "files": (),
    "count": 1,
    "seed": None,
    "colour": "red",
    "fsync": None,
    "is_dry": False,
    "depth": 2,
    "inner": Inner(pairs=(), size_bytes=2048),
    "memo": "no option",
}


@pytest.fixture(autouse=True)
def _no_calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


def invoke(*words: str) -> Result:
    return CliRunner().invoke(work, words)


def test_every_option_reaches_its_parameter_in_the_type_of_its_parser() -> None:
    words = ("a", "x", "y", "--count", "1", "--seed", "7", "--colour", "blue", "--no-fsync", "--dry-run")
    assert invoke(*words, "-o", "k=v", "--option", "l=w", "--size", "1MiB").exit_code == 0
    given = {
        "files": (Path("x"), Path("y")),
        "seed": 7,
        "colour": "blue",
        "fsync": False,
        "is_dry": True,
        "inner": Inner(pairs=(("k", "v"), ("l", "w")), size_bytes=1 << 20),
    }
    assert [USUAL | given] == CALLS


def test_omitted_options_have_their_defaults() -> None:
    assert invoke("a", "--count", "1").exit_code == 0
    assert [USUAL] == CALLS
    assert Inner() == Inner(pairs=(), size_bytes=2048)


def test_the_number_that_a_command_returns_is_its_exit_code() -> None:
    assert invoke("a", "--count", "3").exit_code == 2


def test_json_is_an_option_of_every_command() -> None:
    assert invoke("a", "--count", "1", "--json").stdout == '{\n  "name": "a"\n}\n'
    assert invoke("a", "--count", "1").stdout == "a\n"

    @partial(verb, has_json=False)
    def silent(terminal: Terminal) -> None:
        """Do nothing."""
        assert not terminal.as_json

    assert CliRunner().invoke(silent, ["--json"]).exit_code == 2
    assert CliRunner().invoke(silent, []).exit_code == 0


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--count", "0"], "--count"),
        (["--count", "1", "--colour", "green"], "--colour"),
        (["--count", "1", "-o", "novalue"], "--option"),
        (["--count", "1", "--size", "4G"], "--size"),
    ],
)
def test_an_error_of_a_parser_names_its_option(words: list[str], where: str) -> None:
    error = invoke("a", *words).exception
    assert isinstance(error, UsageError)
    assert error.where == where
    assert error.fix


@pytest.mark.parametrize("words", [[], ["a"], ["a", "--count"], ["a", "--count", "1", "--unknown"]])
def test_missing_and_unknown_options_are_wrong_usage(words: list[str]) -> None:
    assert invoke(*words).exit_code == 2
    assert not CALLS


def test_help_shows_text_examples_arguments_and_panels_in_this_order() -> None:
    text = CliRunner().invoke(work, ["--help"]).stdout
    places = [
        text.index(part)
        for part in (
            "Do some work",
            "Examples:",
            "work a --count 1",
            "Arguments:",
            "What it is called.",
            "Options:",
            "--count N",
            "More:",
            "--depth N",
            "Inner options:",
            "-o, --option NAME=VALUE",
        )
    ]
    assert places == sorted(places)
    assert "How many.  [required]" in text
    assert "-h, --help" in text
    assert "--colour red|blue" in text
    assert "Bytes to move.  [default: 2KiB]" in text
    assert "Set an option.  [repeatable]" in text
    assert "--fsync / --no-fsync" in text


def test_choices_are_completed() -> None:
    completion = ShellComplete(work, {}, "work", "_WORK_COMPLETE")
    words = ["a", "--count", "1", "--colour"]
    assert [item.value for item in completion.get_completions(words, "b")] == ["blue"]
    (item,) = completion.get_completions(["a"], "fil")
    assert item.type == "file"


def test_options_of_groups_are_found_in_place() -> None:
    assert [(path, panel) for path, _, panel in work.declared][-5:] == [
        ("is_dry", None),
        ("depth", "More"),
        ("inner__pairs", "Inner options"),
        ("inner__size_bytes", "Inner options"),
        ("as_json", None),
    ]
    assert fill(options_of(Inner), {"size_bytes": 1}) == {"pairs": (), "size_bytes": 1}


def test_an_option_that_several_share_is_one_constant() -> None:
    @verb
    def other(terminal: Terminal, *, seed: int | None = SEED) -> None:
        """Do other work."""
        terminal.result({"seed": seed}, [])

    assert CliRunner().invoke(other, ["--seed", "3", "--json"]).stdout == '{\n  "seed": 3\n}\n'
    assert invoke("a", "--count", "1", "--seed", "4").exit_code == 0
    assert CALLS[0]["seed"] == 4


def test_a_group_imports_a_command_when_it_is_asked_for() -> None:
    tools = Group("Tools.", {"work": f"{__name__}:work", "idle": work})
    context = click.Context(tools, info_name="tools")
    assert tools.list_commands(context) == ["work", "idle"]
    assert tools.get_command(context, "work") is work
    assert tools.get_command(context, "play") is None
    help_text = CliRunner().invoke(tools, ["--help"]).stdout
    assert help_text.count("Do some work, and say so.") == 2
    wrong = CliRunner().invoke(tools, ["wrok"])
    assert wrong.exit_code == 2
    assert "Did you mean work?" in wrong.stderr


def test_a_command_knows_its_command_line() -> None:
    lines = []

    @verb
    def remember(terminal: Terminal) -> None:
        """Remember the command line."""
        assert terminal.speaks
        lines.append(command_line())

    CliRunner().invoke(remember, [], obj=["storage", "probe"])
    assert lines == [("penstock", "storage", "probe")]


def every_verb(command: click.Command, name: str) -> Iterator[tuple[str, Verb]]:
    if isinstance(command, Group):
        for word in command.verbs:
            found = command.get_command(click.Context(command), word)
            assert found is not None
            yield from every_verb(found, f"{name} {word}")
    else:
        assert isinstance(command, Verb)
        yield name, command


VERBS = dict(every_verb(app, "penstock"))


@pytest.mark.parametrize("name", VERBS)
def test_every_command_has_a_sentence_and_an_example_that_it_understands(name: str) -> None:
    command = VERBS[name]
    assert (command.help or "").partition("\n\n")[0].rstrip().endswith(".")
    assert command.examples
    assert any(f"{name}" in example for example in command.examples)


@pytest.mark.parametrize("name", VERBS)
def test_help_of_options_says_what_they_do(name: str) -> None:
    for path, declaration, _ in VERBS[name].declared:
        assert declaration.help.endswith((".", "...")), path
        assert declaration.help[:1].isupper(), path


@pytest.mark.parametrize("name", VERBS)
def test_every_default_is_one_that_its_parser_accepts(name: str) -> None:
    for _, declaration, _ in VERBS[name].declared:
        if declaration.parser is not None and declaration.default is not None:
            declaration.parser(declaration.default)


def test_no_two_options_of_a_command_have_one_name() -> None:
    for name, command in VERBS.items():
        names: list[Any] = [text for one in command.params for text in (*one.opts, *one.secondary_opts)]
        assert len(names) == len(set(names)), name


def test_declarations_name_options_arguments_and_flags() -> None:
    def declaring(
        *,
        target: str = required("--target", TEXT, "Write here.", short="-t", metavar="PLACE"),
        only: tuple[str, ...] = repeated("--only", TEXT, "Take only these."),
        mode: str | None = option("--mode", TEXT, "Use this mode.", short="-m"),
        rest: tuple[str, ...] = arguments("[REST...]", TEXT, "More.", is_required=False),
        place: str = optional_argument("[PLACE]", TEXT, "Where.", default="here"),
        fsync: bool | None = switch("--fsync", "Sync."),
    ) -> tuple[object, ...]:
        return target, only, mode, rest, place, fsync

    declared = {path: declaration for path, declaration, _ in declarations(options_of(declaring))}
    assert {path: declaration.names for path, declaration in declared.items()} == {
        "target": ("-t", "--target"),
        "only": ("--only",),
        "mode": ("-m", "--mode"),
        "rest": (),
        "place": (),
        "fsync": ("--fsync/--no-fsync",),
    }
    assert declared["target"].is_required
    assert declared["target"].metavar == "PLACE"
    assert not declared["rest"].is_required
    assert declared["rest"].is_repeated
    assert declaring(**fill(options_of(declaring), {"target": "x"})) == ("x", (), None, (), "here", None)


def test_missing_libraries_of_a_group_name_its_extra() -> None:
    def call() -> None:
        raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")

    def defect() -> None:
        raise ModuleNotFoundError("No module named 'penstok'", name="penstok")

    verbs = {"ask": click.Command("ask", callback=call), "fail": click.Command("fail", callback=defect)}
    tools = Group("Tools.", verbs, extra="trace")
    error = CliRunner().invoke(tools, ["ask"]).exception
    assert isinstance(error, Unavailable)
    assert "penstock-io[trace]" in str(error)
    assert isinstance(CliRunner().invoke(tools, ["fail"]).exception, ModuleNotFoundError)


def test_a_letter_is_short_for_the_same_option_in_every_verb() -> None:
    meanings: dict[str, set[str]] = {}
    for command in VERBS.values():
        for _, declaration, _ in command.declared:
            for letter in (name for name in declaration.names if len(name) == 2):
                meanings.setdefault(letter, set()).update(set(declaration.names) - {letter})
    assert meanings.pop("-o") <= {"--output", "--out", "--output-dir"}
    assert meanings.pop("-O") == {"--option"}
    assert all(len(options) == 1 for options in meanings.values()), meanings


DATA = ("unet3d_h100", "--data", "data")
RUN = ("training", "run", *DATA, "--results", "runs")
OWN = ("training", "run", "--loader", "my:loader", "--results", "runs")
SWEEP = ("training", "sweep", *DATA, "--results", "runs", "--most", "2", "--")
PLAN = ("checkpoint", "plan", "--state", "1TiB", "--nodes", "8", "--fast", "1GB/s", "--slow", "1GB/s",
        "--node-mtbf", "90d")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        (("kvcache", "run", "mlperf-v3", "--to", "kv", "--page", "p.html", "--keep"), "--page and --keep"),
        (("kvcache", "run", "--to", "kv", "--trials", "2"), "--trials"),
        (("storage", "probe", "x", "--request", "4KiB", "--rates", "9"), "--request and --rates"),
        (("storage", "probe", "x", "--measure", "knee", "--blocks", "1MiB"), "--blocks"),
        (("storage", "probe", "x", "--measure", "knee", "--streams", "4"), "--streams"),
        (("storage", "probe", "x", "--measure", "metadata", "--size", "4GiB"), "--size"),
        (("kvcache", "size", "--max-requests", "9", "--format", "mooncake"), "--format and --max-requests"),
        ((*RUN, "--system", "fast"), "--system"),
        ((*RUN, "--checkpoints", "saves"), "--checkpoints"),
        ((*RUN, "--epochs", "2", "--try", "workers=1"), "--epochs and --try"),
        ((*OWN, "--submission", "x", "--system", "y", "--closed"), "--submission and --system and --closed"),
        ((*OWN, "--check", "full", "--skip-gate", "ipc"), "--check and --skip-gate"),
        ((*OWN, "--option", "fsync=false"), "--option"),
        ((*OWN, "--accelerator", "h100"), "--accelerator"),
        ((*SWEEP, "--ranks", "4", "--results=x", "--trace", "t"), "--ranks and --results"),
        ((*SWEEP, "--json"), "--json"),
        ((*SWEEP, "--data", "x", "--accelerator", "b200"), "--accelerator and --data"),
        (
            ("training", "generate", *DATA, "--launcher-arg", "-v", "--env", "HOME"),
            "--launcher-arg and --env",
        ),
        (("workloads", "--accelerator", "h100", "--set", "train.epochs=1"), "--accelerator and --set"),
        (("checkpoint", "run", "llama3-8b", "--to", "x", "--results", "r", "--system", "fast"), "--system"),
        (
            ("checkpoint", "run", "llama3-8b", "--to", "x", "--results", "r", "--accelerator", "b200"),
            "--accelerator",
        ),
        (("checkpoint", "size", "llama3-8b", "--subset"), "--subset"),
        (("checkpoint", "status", "run", "--watch"), "--watch"),
        (("checkpoint", "convert", "a", "b", "--shard-size", "1GB"), "--shard-size"),
        (("checkpoint", "convert", "a", "b", "--trust"), "--trust"),
        (("checkpoint", "convert", "a", "b.safetensors", "--shard-size", "1GB"), "--shard-size"),
        ((*PLAN, "--scheme", "single", "--group", "4", "--network", "1GB/s"), "--network and --group"),
        ((*PLAN, "--nodes", "4", "--group", "5"), "--group"),
        (("cluster", "check", "cluster.json", "--gate", "ipc", "-O", "a=b"), "--gate and --option"),
        (("cluster", "check", "-O", "a=b"), "--option"),
        (
            ("cluster", "collect", "--launcher", "srun", "--launcher-arg", "-v"),
            "--launcher and --launcher-arg",
        ),
        (("submission", "rehearse", "llama3-8b", "tree", "--set", "train.epochs=1"), "--set"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    words: tuple[str, ...],
    ignored: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words]) == 2
    assert f"penstock: {ignored} would be ignored: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("ftp://x",), ("x", "-O", "fsink=no")])
def test_a_probe_of_no_storage_leaves_no_run(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["storage", "probe", *words, "--results", "runs"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_pages_that_messages_name_are_there() -> None:
    root = Path(penstock.__file__).parents[2]
    named = {
        topic
        for module in Path(penstock.__file__).parent.rglob("*.py")
        for topic in re.findall(r"`penstock docs ([a-z][a-z-]+)", module.read_text(encoding="utf-8"))
    }
    assert named
    assert {topic for topic in named if not (root / "docs" / f"{topic}.md").is_file()} == set()
