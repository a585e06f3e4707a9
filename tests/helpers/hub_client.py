"""What the tests of the Hub run in processes of their own:
the client reads its settings when it is imported.

    python hub_client.py FOLDER push
    python hub_client.py FOLDER load without

write FOLDER/STEP.json. `push` trains and pushes; the others compare with what it left.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from places import ROOT

sys.path.append(str(ROOT / "recipes"))

import peft
import torch
from benchmark_scores import scores
from huggingface_hub import ModelCard, constants
from models import tokens
from safetensors.torch import load_file, save_file
from study.run import load_base
from training import make_trainer, rows
from transformers import AutoModelForCausalLM

import hf_depthroute
from hf_depthroute.card import add_results, push_folder
from hf_depthroute.cli import main
from hf_depthroute.evaluation import evaluate_budgets
from hf_depthroute.routing.routing import Routing

BASE = "someone/tiny-llama"
CONFIG = hf_depthroute.DepthRouteConfig(layers=[1, 3], budget=0.5)


def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(BASE)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=tokens(2, 12, seed=5)).logits


def cli(*arguments: object) -> list[Any]:
    """Exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            return [ended.code, out.getvalue(), err.getvalue()]
    raise AssertionError("the command line did not end")


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def push(folder: Path) -> dict[str, Any]:
    model = hf_depthroute.get_depth_routed_model(base(), CONFIG)
    trainer, _ = make_trainer(
        model, rows(8), folder / "run", hub_model_id="me/by-trainer", hub_private_repo=True
    )
    trainer.train()
    batch = {"input_ids": tokens(8, 12, seed=3)}
    hf_depthroute.calibrate(model, [batch])
    add_results(model, evaluate_budgets(model, [batch], None, [0.25, 0.5]))
    first = model.push_to_hub("router", private=True)
    kept = {"first": logits(model)}
    hf_depthroute.set_budget(model, 0.25)
    kept["second"] = logits(model)
    second = model.push_to_hub("me/router", tags=["my-tag"])
    again = model.push_to_hub("me/router", tags=["my-tag"])
    branch = model.push_to_hub("me/router", revision="other", commit_message="to a branch")
    save_file(kept, folder / "logits.safetensors")
    trainer.push_to_hub(license="apache-2.0", dataset="someone/text")
    model.save_pretrained(folder / "adapter")
    sent = cli(
        "card", folder / "adapter", "--push-to", "me/by-command", "--private", "--license", "mit"
    )
    lora = peft.get_peft_model(
        base(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    lora.push_to_hub("me/lora")
    push_folder(folder / "adapter", "me/measured", results=[scores()])
    push_folder(folder / "adapter", "me/measured")  # nothing new: what was measured stays
    model.push_to_hub("me/remeasured", results=[scores()])
    hf_depthroute.set_budget(model, 0.5)
    model.push_to_hub("me/remeasured", results=[evaluate_budgets(model, [batch], None, [0.5])])
    foreign = refusal(lambda: model.push_to_hub("someone/tiny-llama"))
    commits = {"first": first.oid, "second": second.oid, "again": again.oid, "branch": branch.oid}
    return {"commits": commits, "command": sent, "foreign": foreign}


def load(folder: Path) -> dict[str, Any]:
    commits, same = json.loads((folder / "push.json").read_text())["commits"], {}
    wanted = load_file(folder / "logits.safetensors")
    for name, revision, which in (
        ("sha", commits["first"], "first"),
        ("main", None, "second"),
        ("branch", "other", "second"),
    ):
        model = peft.PeftModel.from_pretrained(base(), "me/router", revision=revision)
        same[name] = bool(torch.equal(logits(model), wanted[which]))
    card = ModelCard.load("me/router")
    # But the endpoint that is set.
    asked = "https://huggingface.co" not in inspect.getsource(ModelCard.validate)
    if asked:
        card.validate()
    broken = ModelCard(card.content.replace("base_model: someone/", "base_model: ../someone/"))
    private = peft.PeftModel.from_pretrained(base(), folder / "adapter")
    constants.HF_TOKEN_PATH, before = str(folder / "no-token"), os.environ.pop("HF_TOKEN", None)
    nobody = refusal(lambda: private.push_to_hub("me/router"))
    os.environ |= {} if before is None else {"HF_TOKEN": before}
    errors = {
        "no token": nobody,
        "no base": refusal(lambda: load_base("me/absent")),
        "card": refusal(broken.validate) if asked else None,
        "repository": refusal(lambda: peft.PeftModel.from_pretrained(base(), "me/absent")),
        "revision": refusal(
            lambda: peft.PeftModel.from_pretrained(base(), "me/router", revision="absent")
        ),
        "file": refusal(lambda: peft.PeftModel.from_pretrained(base(), BASE)),
        "gated": refusal(lambda: peft.PeftModel.from_pretrained(base(), "someone/gated")),
    }
    prompt = ("--prompt", "the cat", "--max-new-tokens", 2)
    commands = {
        "generate": cli("generate", "--adapter", "me/router", *prompt),
        "card": cli("card", "me/router", "--out", "-"),
        "absent": cli("generate", "--adapter", "me/absent", *prompt),
        "no adapter": cli("generate", "--adapter", BASE, *prompt),
        "gated": cli("generate", "--adapter", "someone/gated", *prompt),
        "not mine": cli("card", "me/router", "--push-to", "someone/tiny-llama"),
    }
    return {"same": same, "errors": errors, "commands": commands}


def without(folder: Path) -> dict[str, Any]:
    """The Hub is gone; what was downloaded is still there."""
    with urllib.request.urlopen(f"{constants.ENDPOINT}/stand-in/stop"):
        pass
    time.sleep(1)
    time.sleep = lambda seconds: None  # the client waits longer and longer between its attempts
    wanted = load_file(folder / "logits.safetensors")["second"]
    constants.HF_HUB_OFFLINE = True
    untouched = base()
    adapted = peft.PeftModel.from_pretrained(base(), folder / "adapter")
    constants.HF_HUB_OFFLINE = False
    before = logits(untouched)

    def commands() -> dict[str, Any]:
        return {
            "absent": cli("generate", "--adapter", "me/never-downloaded", "--prompt", "the"),
            "cached": cli(
                "generate", "--adapter", "me/router", "--prompt", "the", "--max-new-tokens", 2
            ),
            "push": cli("card", folder / "adapter", "--push-to", "me/router"),
            "python": {
                "push": refusal(lambda: adapted.push_to_hub("me/router")),
                "base": refusal(lambda: load_base("me/never-downloaded")),
            },
        }

    dead = commands()
    # PEFT asks the Hub which files there are, and does not look into its cache when there is no
    # answer.
    dead["load"] = refusal(lambda: peft.PeftModel.from_pretrained(untouched, "me/router"))
    routing = any(isinstance(module, Routing) for module in untouched.modules())
    dead["untouched"] = bool(torch.equal(logits(untouched), before)) and not routing
    constants.HF_HUB_OFFLINE = True
    offline = commands()
    offline["same"] = bool(
        torch.equal(logits(peft.PeftModel.from_pretrained(base(), "me/router")), wanted)
    )
    return {"dead": dead, "offline": offline}


if __name__ == "__main__":
    place, steps = Path(sys.argv[1]), {"push": push, "load": load, "without": without}
    for step in sys.argv[2:]:
        with contextlib.redirect_stdout(sys.stderr):
            result = steps[step](place)
        (place / f"{step}.json").write_text(json.dumps(result))
