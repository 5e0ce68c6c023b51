"""A verb that asks traces one question: it names its own options, and gets those that all questions share.

Invariant: what a verb gets as `Asking` is what its `--help` shows.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, get_type_hints

from penstock.cli.terminal import JsonFlag, Terminal
from penstock.cli.trace.asking import AnswerForm, Classes, FormOption, Phases, Tiers, asked, make_lens, show
from penstock.cli.trace.opening import Dask, Files, Strict, Where

if TYPE_CHECKING:
    from penstock.trace.questions.answer import Answer
    from penstock.trace.questions.events_view import EventsView

LENS = frozenset({"tier", "file_class", "phase"})
"""The options of `Asking` that only some questions take."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What is asked, through which lens, and how the answer is printed: the options of all questions."""

    files: Files
    tier: Tiers = None
    file_class: Classes = None
    phase: Phases = None
    where: Where = ""
    dask: Dask = ""
    strict: Strict = False
    form: FormOption = AnswerForm.TABLE
    as_json: JsonFlag = False

    @contextmanager
    def events(self) -> Iterator[EventsView]:
        """The traces, opened and seen through the lens."""
        lens = make_lens(self.tier, self.file_class, self.phase)
        terminal = Terminal(as_json=self.as_json)
        with asked(
            self.files, terminal, lens, where=self.where, dask=self.dask, strict=self.strict
        ) as events:
            yield events

    def show(self, answers: Sequence[Answer]) -> None:
        """Print the answers."""
        show(Terminal(as_json=self.as_json), answers, self.form)


def question(*lens: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a verb of a function of an `Asking`: first its own options, then those of `lens` and of all."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]
        files, *shared = _shared(omitted=LENS - set(lens))
        arguments = [each for each in own if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        options = [each for each in own if each.kind is inspect.Parameter.KEYWORD_ONLY]
        parameters = [*arguments, files, *options, *shared]

        @wraps(verb)
        def ask(**words: Any) -> None:
            mine = {each.name: words.pop(each.name) for each in own}
            verb(Asking(**words), **mine)

        vars(ask)["__signature__"] = inspect.Signature(parameters)
        ask.__annotations__ = {each.name: each.annotation for each in parameters}
        return ask

    return decorate


def _shared(omitted: frozenset[str] | set[str]) -> list[inspect.Parameter]:
    """The fields of `Asking` as parameters: the files as arguments, the rest by name."""
    hints = get_type_hints(Asking, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(Asking)
        if field.name not in omitted
    ]
    return [parameters[0].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters[1:]]
