"""What commands print with `--json` fits the schemas of docs/schemas."""

import json
from pathlib import Path

import jsonschema
import pytest
from scripts.docs_hooks import walk
from scripts.json_schemas import FOLDER, gather

from penstock.cli.app import app


def test_schemas_are_those_of_verbs() -> None:
    verbs = {"-".join(words[1:]) for words, _ in walk(app, ("penstock",))}
    for path in FOLDER.glob("*.json"):
        schema = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator.check_schema(schema)
        verb, _, version = path.stem.rpartition("-")
        assert verb in verbs
        assert schema["properties"]["schema"] == {"const": f"{verb}/{version}"}


@pytest.mark.examples
def test_documents_fit_their_schemas(tmp_path: Path) -> None:
    checked = set()
    for document in gather(tmp_path):
        if "schema" not in document:
            assert "version" in document
            continue
        path = FOLDER / f"{document['schema'].replace('/', '-')}.json"
        jsonschema.validate(document, json.loads(path.read_text(encoding="utf-8")))
        checked.add(path)
    assert checked == set(FOLDER.glob("*.json"))
