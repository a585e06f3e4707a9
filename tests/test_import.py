"""What `import hf_depthroute` brings in."""

import subprocess
import sys

import pytest

import hf_depthroute

HEAVY = ("datasets", "matplotlib", "lm_eval", "evaluate", "transformers.trainer", "typer", "hf_depthroute.bench")


def test_import_leaves_heavy_packages_alone():
    code = f"import hf_depthroute, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    before = f"import transformers, peft, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    loaded = [subprocess.run([sys.executable, "-c", c], capture_output=True, text=True).stdout for c in (code, before)]
    assert loaded[0] == loaded[1] == "[]\n"


def test_every_public_name_exists():
    for name in hf_depthroute.__all__:
        assert getattr(hf_depthroute, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'DepthRouter'"):
        _ = hf_depthroute.DepthRouter


def test_the_arguments_of_the_losses_come_from_the_package_itself():
    from hf_depthroute.arguments import RoutingArguments

    assert hf_depthroute.RoutingArguments is RoutingArguments and "RoutingArguments" in hf_depthroute.__all__
