import sys
from importlib import import_module

import pytest

from penstock.errors import Unavailable


@pytest.mark.parametrize(
    ("adapter", "framework", "package"),
    [
        ("lightning", "lightning", "lightning"),
        ("megatron", "megatron", "megatron-core"),
        ("resiliency", "nvidia_resiliency_ext", "nvidia-resiliency-ext"),
        ("torchtitan", "torchtitan", "torchtitan"),
    ],
)
def test_an_adapter_without_its_framework_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, adapter: str, framework: str, package: str
) -> None:
    monkeypatch.delitem(sys.modules, f"penstock.checkpoint.adapters.{adapter}", raising=False)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(Unavailable, match=f"pip install {package}") as caught:
        import_module(f"penstock.checkpoint.adapters.{adapter}")
    assert framework in str(caught.value)
