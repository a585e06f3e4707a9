"""What `import hf_depthroute` brings in."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
from places import ROOT

import hf_depthroute

HEAVY = (
    "datasets",
    "matplotlib",
    "lm_eval",
    "evaluate",
    "transformers.trainer",
    "typer",
    "hf_depthroute.bench",
)


# What two processes see that import the package before PEFT and after it; each takes seconds to
# start.
LOOK = "[name for name in heavy if name in sys.modules]"
READ = "PeftConfig.from_pretrained(folder).budget"
FIRST = f"""
import json, sys
folder, config, *heavy = sys.argv[1:]
import hf_depthroute
found = {{"heavy": {LOOK}, "unlisted": [*set(hf_depthroute.__all__) - set(dir(hf_depthroute))]}}
from peft import PeftConfig
found["budget"] = {READ}
print(json.dumps(found))
"""
SECOND = f"""
import json, os, pickle, sys
folder, config, *heavy = sys.argv[1:]
import peft, transformers
from peft import PeftConfig
found = {{"heavy": {LOOK}}}
try:
    {READ}
except KeyError as error:
    found["without"] = f"KeyError: {{error}}"
reading, writing = os.pipe()
if os.fork() == 0:  # where nothing but what is unpickled imports the package
    config = pickle.loads(bytes.fromhex(config))
    os.write(writing, f"{{config.gate}} {{config.peft_type.value}}".encode())
    os._exit(0)
os.close(writing)
found["unpickled"] = os.fdopen(reading).read()
import hf_depthroute
found["budget"] = {READ}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    config = hf_depthroute.DepthRouteConfig(layers=[1], gate="jepa", budget=0.25)
    config.save_pretrained(folder)
    words = [folder, pickle.dumps(config).hex(), *HEAVY]
    found = {}
    for name, code in (("first", FIRST), ("second", SECOND)):
        ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")
        found[name] = json.loads(ended.stdout)
    return found


def test_import_leaves_heavy_packages_alone(seen):
    assert seen["first"]["heavy"] == seen["second"]["heavy"] == []


def test_what_peft_says_without_this_package_is_a_heading_of_the_documentation(seen):
    said = seen["second"]["without"]
    assert said == "KeyError: 'DEPTH_ROUTE'"
    page = ROOT / "docs" / "how-to" / "troubleshooting.md"
    assert f"## `{said}`" in page.read_text()


def test_every_public_name_exists():
    for name in hf_depthroute.__all__:
        assert getattr(hf_depthroute, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'DepthRouter'"):
        _ = hf_depthroute.DepthRouter


def test_the_arguments_of_the_losses_come_from_the_package_itself():
    from hf_depthroute.training.arguments import RoutingArguments

    assert (
        hf_depthroute.RoutingArguments is RoutingArguments
        and "RoutingArguments" in hf_depthroute.__all__
    )


@pytest.mark.parametrize("order", ["first", "second"])
def test_importing_the_package_registers_the_method_in_either_order(order, seen):
    assert seen[order]["budget"] == 0.25


def test_a_config_is_copied_and_pickled_into_another_process(seen):
    config = hf_depthroute.DepthRouteConfig(layers=[1], gate="jepa")
    assert (
        copy.deepcopy(config) == copy.copy(config) == pickle.loads(pickle.dumps(config)) == config
    )
    assert seen["second"]["unpickled"] == "jepa DEPTH_ROUTE"


def test_the_names_are_listed_before_they_are_used(seen):
    assert seen["first"]["unlisted"] == []
