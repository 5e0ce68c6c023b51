from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.integration.checkpoint.adapters.peers import Programs


@pytest.fixture(scope="module")
def seen(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("hugging face")
    return programs.seen_by("hugging_face_resumes", root, needs="transformers")


def test_a_trainer_that_was_stopped_resumes_to_the_very_weights_of_one_that_never_was(seen: Any) -> None:
    assert (seen["stopped_at"], seen["resumed_from"], seen["ended_at"]) == (7, 4, 10)
    assert seen["same"]
    assert seen["same_rate"]


def test_a_trainers_checkpoints_are_the_managers_steps_and_nothing_is_saved_twice(seen: Any) -> None:
    assert seen["steps"] == [8, 10]
    assert seen["weights_beside"] == []


def test_what_would_look_for_weights_elsewhere_is_refused(seen: Any) -> None:
    assert "load_best_model_at_end" in seen["refused"]


def test_an_accelerator_goes_on_where_it_was_with_its_random_numbers(seen: Any) -> None:
    assert seen["accelerate_resumed_from"] == 3
    assert seen["accelerate_same"]
