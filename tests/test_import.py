"""What `import hf_depthroute` brings in."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import hf_depthroute

HEAVY = ("datasets", "matplotlib", "lm_eval", "evaluate", "transformers.trainer", "typer", "hf_depthroute.bench")


def test_import_leaves_heavy_packages_alone():
    code = f"import hf_depthroute, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    before = f"import transformers, peft, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    loaded = [subprocess.run([sys.executable, "-c", c], capture_output=True, text=True).stdout for c in (code, before)]
    assert loaded[0] == loaded[1] == "[]\n"


def test_what_peft_says_without_this_package_is_a_heading_of_the_documentation(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(hf_depthroute.DepthRouteConfig().to_dict()))
    code = f"import peft; peft.PeftConfig.from_pretrained({str(tmp_path)!r})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()[-1]
    assert said == "KeyError: 'DEPTH_ROUTE'"
    page = Path(__file__).parents[1] / "docs" / "how-to" / "troubleshooting.md"
    assert f"## `{said}`" in page.read_text()


def test_every_public_name_exists():
    for name in hf_depthroute.__all__:
        assert getattr(hf_depthroute, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'DepthRouter'"):
        _ = hf_depthroute.DepthRouter


def test_the_arguments_of_the_losses_come_from_the_package_itself():
    from hf_depthroute.training.arguments import RoutingArguments

    assert hf_depthroute.RoutingArguments is RoutingArguments and "RoutingArguments" in hf_depthroute.__all__


@pytest.mark.parametrize("order", ["import hf_depthroute, peft", "import peft, hf_depthroute"])
def test_importing_the_package_registers_the_method_in_either_order(order, tmp_path):
    config = hf_depthroute.DepthRouteConfig(layers=[1], budget=0.25)
    config.save_pretrained(tmp_path)
    read = f"from peft import PeftConfig; c = PeftConfig.from_pretrained({str(tmp_path)!r}); print(c.budget)"
    ended = subprocess.run([sys.executable, "-c", f"{order}; {read}"], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("0.25\n", "")


def test_a_config_is_copied_and_pickled_into_another_process():
    config = hf_depthroute.DepthRouteConfig(layers=[1], gate="jepa")
    assert copy.deepcopy(config) == copy.copy(config) == pickle.loads(pickle.dumps(config)) == config
    read = f"import pickle; c = pickle.loads({pickle.dumps(config)!r}); print(c.gate, c.peft_type.value)"
    ended = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("jepa DEPTH_ROUTE\n", "")


def test_the_names_are_listed_before_they_are_used():
    code = "import hf_depthroute; print(set(hf_depthroute.__all__) - set(dir(hf_depthroute)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
