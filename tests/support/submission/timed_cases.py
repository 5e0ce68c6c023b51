"""How the trees of rules of v2.0 and v3.0 are written down: a name, a change of a valid tree, a verdict."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, Literal

from tests.support.submission.rule_trees import RuleTree
from tests.support.submission.timed_tree import Round, valid_checkpointing, valid_training
from tests.support.submission.tree_changes import Change

from penstock.submission.rules.rule import Verdict

FAIL, WARNING, UNKNOWN, PASS = Verdict.FAIL, Verdict.WARNING, Verdict.NOT_CHECKED, Verdict.PASS
NA: Final = Verdict.NOT_APPLICABLE


def base_tree(base: str, edition: str) -> Round:
    """A valid tree: of a training, of a checkpointing in two invocations, or in one."""
    made, is_strict = ("v3.0", True) if edition in STRICT else (edition, False)
    if base == "training":
        tree = valid_training(made)
    else:
        tree = valid_checkpointing(made, num_invocations=1 if base == "together" else 2)
    return replace(tree, edition=edition) if is_strict else tree


def _of(base: Literal["training", "checkpointing", "together"]) -> Callable[..., RuleTree[Round]]:
    def case(
        name: str, change: Change, verdict: Verdict = FAIL, editions: tuple[str, ...] = ("v2.0", "v3.0")
    ) -> RuleTree[Round]:
        return RuleTree(
            name=name, make=partial(base_tree, base), change=change, verdict=verdict, editions=editions
        )

    return case


run, ckpt, once = _of("training"), _of("checkpointing"), _of("together")
NEW: Final = ("v3.0",)
STRICT: Final = ("v3.0-strict",)


def softened(
    make: Callable[..., RuleTree[Round]], name: str, change: Change
) -> tuple[RuleTree[Round], RuleTree[Round]]:
    """What the round of v3.0 let pass with a warning, and what its validator says since."""
    return make(name, change, WARNING, NEW), make(f"{name}, in earnest", change, FAIL, STRICT)
