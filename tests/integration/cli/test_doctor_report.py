"""`penstock doctor` for people: areas, states, and a fix below whatever is limited or missing."""

import json
from pathlib import Path

from tests.support.command_line import run_command


def test_report_shows_every_diagnosis_with_its_fix(tmp_path: Path) -> None:
    text = run_command("doctor", "--at", tmp_path).stdout
    lines = text.splitlines()
    diagnoses = json.loads(run_command("doctor", "--at", tmp_path, "--json").stdout)["diagnoses"]
    for area in {diagnosis["area"] for diagnosis in diagnoses}:
        assert lines.count(area) == 1
    for diagnosis in diagnoses:
        start = f"  {diagnosis['state']:<8} {diagnosis['subject']} "
        assert any(line.startswith(start) for line in lines), start
        if diagnosis["fix"]:
            assert diagnosis["fix"] in [line.strip() for line in lines]
    num_fixes = sum(bool(diagnosis["fix"]) for diagnosis in diagnoses)
    num_areas = len({diagnosis["area"] for diagnosis in diagnoses})
    assert len(lines) == len(diagnoses) + num_fixes + num_areas + 1
    counts = [sum(diagnosis["state"] == state for diagnosis in diagnoses) for state in ("ok", "limited")]
    assert lines[-1].startswith(f"{counts[0]} ok, {counts[1]} limited, ")
