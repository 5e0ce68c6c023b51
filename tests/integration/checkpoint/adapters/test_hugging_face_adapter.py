from typing import Any

import pytest
from tests.integration.checkpoint.adapters.peers import Programs


@pytest.fixture(scope="module")
def seen(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("hugging face")
    return programs.seen_by("hugging_face_resumes", root, needs="transformers")


def test_a_resumed_trainer_reaches_the_weights_of_an_uninterrupted_one(seen: Any) -> None:
    assert (seen["stopped_at"], seen["resumed_from"], seen["ended_at"]) == (7, 4, 10)
    assert seen["same"]
    assert seen["same_rate"]


def test_a_trainers_checkpoints_are_the_managers_steps_and_nothing_is_saved_twice(seen: Any) -> None:
    assert seen["steps"] == [8, 10]
    assert seen["weights_beside"] == []


def test_load_best_model_at_end_is_refused(seen: Any) -> None:
    assert "load_best_model_at_end" in seen["refused"]


def test_an_accelerator_resumes_with_its_random_numbers(seen: Any) -> None:
    assert seen["accelerate_resumed_from"] == 3
    assert seen["accelerate_same"]
