import pytest

from penstock.did_you_mean import did_you_mean, nearest

KNOWN = ("unet3d", "resnet50", "retinanet", "cosmoflow")


@pytest.mark.parametrize(
    ("written", "meant"),
    [("unet3", "unet3d"), ("resnet", "resnet50"), ("retinanett", "retinanet"), ("x", ""), ("", "")],
)
def test_the_nearest_known_name_is_found_or_none(written: str, meant: str) -> None:
    assert nearest(written, KNOWN) == meant
    assert did_you_mean(written, KNOWN) == (f"Did you mean {meant}? " if meant else "")


def test_the_name_is_printed_in_the_form_that_is_asked_for() -> None:
    assert did_you_mean("unet3", KNOWN, form="{}://") == "Did you mean unet3d://? "


def test_a_lower_cutoff_lets_less_similar_names_through() -> None:
    assert nearest("flo", KNOWN) == ""
    assert nearest("flo", KNOWN, cutoff=0.4) == "cosmoflow"


def test_nothing_is_suggested_where_nothing_is_known() -> None:
    assert did_you_mean("unet3d", ()) == ""
