"""`--json` documents keep their keys within a version, and every document is one of a verb."""

from pathlib import Path

import jsonschema
import pytest
from scripts.docs_hooks import walk
from scripts.json_schemas import KEYS, gather, keys_of, schemas_of

from penstock.cli.app import app


@pytest.mark.examples
def test_no_document_loses_a_key_within_its_version(tmp_path: Path) -> None:
    verbs = {"-".join(words[1:]) for words, _ in walk(app, ("penstock",))}
    schemas = schemas_of(list(gather(tmp_path)))
    expected = dict(line.split(": ", 1) for line in KEYS.read_text(encoding="utf-8").splitlines())
    assert set(schemas) == set(expected)
    for name, schema in schemas.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert name.partition("/")[0] in verbs
        found = {key.rstrip("?") for key in keys_of(schema)}
        # What a machine finds differs: a list that is empty here has no keys to compare.
        filled = {key.partition(".")[0] for key in found if "." in key}
        promised = {
            key
            for key in expected[name].split()
            if not key.endswith("?") and ("." not in key or key.partition(".")[0] in filled)
        }
        assert promised <= found, name
