"""Commands that are printed for copying: a name in them may be anything that a folder can be called."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import penstock

OURS = {"seed", "index", "next_verb", "page", "own", "option_name", "EDITION"}
"""Values that are words of ours."""
COMMAND = re.compile(r"(?:^|`|: )penstock [a-z]+ [^`]*$")


def unquoted(path: Path) -> Iterator[str]:
    """The values in commands of one module that no function of shlex has quoted."""
    for node in ast.walk(ast.parse(path.read_text())):
        text = ""
        for part in node.values if isinstance(node, ast.JoinedStr) else ():
            if isinstance(part, ast.Constant):
                text += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                value = ast.unparse(part.value)
                if COMMAND.search(text) and not re.match(r"(?:shlex\.)?(?:quote|join)\(", value):
                    yield value
                text += "value"


def test_each_name_in_a_printed_command_is_quoted() -> None:
    modules = list(Path(penstock.__file__).parent.rglob("*.py"))
    found = {(path.stem, value) for path in modules for value in unquoted(path) if value not in OURS}
    assert not found
