"""lm-eval on local tasks: batch size and padding change no score,
and the command compares dense and routed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lm_eval
import peft
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from models import VOCABULARY, build_base, build_routed, routed
from places import ROOT
from text_models import save_base, word_tokenizer
from transformers import AutoModelForCausalLM

from hf_depthroute.cli import main
from hf_depthroute.cli.errors import CliError
from hf_depthroute.cli.lm_eval import _refuse_padding
from hf_depthroute.evaluation.harness import DepthRouteLM, evaluate_tasks
from hf_depthroute.evaluation.harness_scores import read_scores
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.trace import count_routes

GROUP = ROOT / "recipes" / "router_tuning" / "tasks"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
metadata: {{version: 1}}
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
"""
GENERATION = """
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["<eos>"], max_gen_toks: 4, do_sample: false}
metric_list:
  - {metric: exact_match}
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tasks over twelve questions of different lengths."""
    folder = tmp_path_factory.mktemp("tasks")
    words = "the cat sat on mat and dog ran to a big red hat saw it was said".split()  # noqa: SIM905
    rows = [
        {
            "question": " ".join(words[(3 * i + j) % len(words)] for j in range(2 + i % 7)),
            "choices": [" cat", " big red hat", " dog ran"],
            "answer": i % 3,
        }
        for i in range(12)
    ]
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "choice.yaml").write_text(TASK.format(name="small_choice", data=data) + CHOICE)
    (folder / "generation.yaml").write_text(
        TASK.format(name="small_generation", data=data) + GENERATION
    )
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def requests(tasks: Path) -> list[Any]:
    """The pairs of context and continuation of the choice task."""
    from lm_eval.api.instance import Instance

    rows = [json.loads(line) for line in (tasks / "data.jsonl").read_text().splitlines()]
    pairs = [(row["question"], choice) for row in rows for choice in row["choices"]]
    return [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gate": "jepa"},
        {"target": "attention"},
        {"target": "block"},
        {"granularity": "sequence", "target": "block"},
        {"phases": "prefill"},
    ],
    ids=str,
)
def test_batch_size_and_padding_change_no_score(
    base: Path, tasks: Path, fields: dict[str, Any]
) -> None:
    model = routed(AutoModelForCausalLM.from_pretrained(base), "mlp", **fields)
    found = []
    for batch_size in (1, 3, 36):
        lm = DepthRouteLM(model, tokenizer=word_tokenizer(), batch_size=batch_size)
        found.append(
            torch.tensor(
                [score for score, _ in lm.loglikelihood(requests(tasks), disable_tqdm=True)]
            )
        )
    with model.disable_adapter():
        dense = lm.loglikelihood(requests(tasks), disable_tqdm=True)
    assert (found[0] - torch.tensor([score for score, _ in dense])).abs().max() > 1e-2
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-4)


def test_padding_is_no_part_of_the_share_that_runs_in_full(base: Path, tasks: Path) -> None:
    model = routed(AutoModelForCausalLM.from_pretrained(base), "mlp")
    alone, padded = (
        evaluate_tasks(
            model, word_tokenizer(), ["small_choice"], [0.5], include_path=tasks, batch_size=size
        )[1].full_ratio
        for size in (1, 36)
    )
    assert 0 < alone < 1
    assert padded == pytest.approx(alone, abs=1e-3)


def test_with_prompts_alone_answers_are_scored_as_they_are_served(base: Path, tasks: Path) -> None:
    """The prompt is read once for all of its answers,
    and each token of an answer is decoded behind it."""
    model, tokenizer = (
        routed(AutoModelForCausalLM.from_pretrained(base), "mlp", phases="prefill"),
        word_tokenizer(),
    )
    lm, pairs = DepthRouteLM(model, tokenizer=tokenizer), requests(tasks)
    passes = []
    with model.register_forward_hook(lambda *_: passes.append(1)):
        found = lm.loglikelihood(pairs, disable_tqdm=True)
    prompts = {pair.args[0] for pair in pairs}
    assert len(passes) == len(prompts) + sum(" " in pair.args[1].strip() for pair in pairs)
    for pair, (score, greedy) in zip(pairs, found):
        prompt, answer = (
            tokenizer(part, add_special_tokens=False)["input_ids"] for part in pair.args
        )
        cache, logits = None, []
        for part in [prompt, *[[token] for token in answer[:-1]]]:
            with torch.no_grad():
                out = model(torch.tensor([part]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits[0, -1])
        log_probs = torch.stack(logits).log_softmax(-1)
        assert score == pytest.approx(
            float(log_probs.gather(1, torch.tensor(answer)[:, None]).sum()), abs=1e-4
        )
        assert greedy == (log_probs.argmax(-1).tolist() == answer)


def test_a_prompt_that_is_too_long_loses_its_beginning_with_a_word(base: Path) -> None:
    model = routed(AutoModelForCausalLM.from_pretrained(base), "mlp", phases="prefill")
    lm = DepthRouteLM(model, tokenizer=word_tokenizer(), max_length=8)
    request = (("prompt", "answer"), list(range(3, 13)), [5, 6])
    with pytest.warns(UserWarning, match="1 of 1 requests are longer than the 8 tokens"):
        found = lm._loglikelihood_tokens([request], disable_tqdm=True)
    assert found == lm._loglikelihood_tokens(
        [(request[0], request[1][-7:], [5, 6])], disable_tqdm=True
    )


def test_dense_and_routed_are_compared_and_the_budget_is_restored(base: Path, tasks: Path) -> None:
    model = routed(AutoModelForCausalLM.from_pretrained(base), "mlp", budget=0.4)
    names = ["small_choice", "small_generation"]
    runs = evaluate_tasks(model, word_tokenizer(), names, [0.2, 1.0], include_path=tasks)
    assert [run.name for run in runs] == ["dense", "budget 0.2", "budget 1"]
    assert read_scores(runs[0].results) == read_scores(runs[2].results)
    assert set(read_scores(runs[0].results)) == {
        ("small_choice", "acc"),
        ("small_choice", "acc_norm"),
        ("small_generation", "exact_match"),
    }
    assert runs[0].full_ratio == runs[2].full_ratio == 1.0
    assert 0.0 < runs[1].full_ratio < 0.6
    assert all(run.seconds > 0 for run in runs)
    assert {routing.active_config().budget for routing in routings_of(model)} == {0.4}
    assert {"results", "configs", "versions", "n-shot"} <= set(runs[1].results)


@pytest.mark.nightly(unless=lambda fields: not fields)
@pytest.mark.parametrize(
    "fields", [{}, {"phases": "prefill"}, {"granularity": "sequence"}], ids=str
)
def test_generations_are_timed_without_their_count_and_counted_as_they_were(
    base: Path, tasks: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = routed(AutoModelForCausalLM.from_pretrained(base), "mlp", **fields)
    # No model that was trained writes it.
    model.generation_config.suppress_tokens = [word_tokenizer().pad_token_id]
    recorders: list[int] = []
    generate = HFLM._model_generate

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorders.extend(
            len(routing.state.settings.recorders) for routing in routings_of(self.model)
        )
        return generate(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(HFLM, "_model_generate", timed)
        found = evaluate_tasks(
            model, word_tokenizer(), ["small_generation"], [0.5], include_path=tasks, batch_size=1
        )
        padded = evaluate_tasks(
            model, word_tokenizer(), ["small_generation"], [0.5], include_path=tasks, batch_size=5
        )
    assert set(recorders) == {0}
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    lm = DepthRouteLM(model, budget=0.5, tokenizer=word_tokenizer(), batch_size=1)
    with count_routes(model) as counter:
        lm_eval.simple_evaluate(lm, tasks=["small_generation"], task_manager=manager)
    ratios = counter.full_ratio().values()
    assert found[1].full_ratio == pytest.approx(sum(ratios) / len(ratios), abs=1e-6)
    assert 0 < found[1].full_ratio < 1
    assert padded[1].full_ratio == pytest.approx(found[1].full_ratio, abs=0.01)


def test_lm_eval_finds_the_model_by_name(base: Path, tasks: Path, tmp_path: Path) -> None:
    model = routed(AutoModelForCausalLM.from_pretrained(base), "mlp")
    model.save_pretrained(tmp_path)
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    arguments = {"pretrained": str(base), "adapter": str(tmp_path), "budget": 0.3}
    by_name = lm_eval.simple_evaluate(
        "depthroute", arguments, tasks=["small_choice"], task_manager=manager
    )
    ours = evaluate_tasks(model, word_tokenizer(), ["small_choice"], [0.3], include_path=tasks)[1]
    assert (
        by_name["results"]["small_choice"]["acc,none"]
        == read_scores(ours.results)["small_choice", "acc"][0]
    )


@pytest.mark.nightly
def test_the_group_of_the_paper_is_known_to_lm_eval() -> None:
    manager = lm_eval.tasks.TaskManager(include_path=str(GROUP))
    assert manager.match_tasks(["depthroute_router_tuning"]) == ["depthroute_router_tuning"]
    import yaml

    listed = yaml.safe_load((GROUP / "depthroute_router_tuning.yaml").read_text())["task"]
    shots = {entry["task"]: entry["num_fewshot"] for entry in listed}
    assert list(shots.values()) == [0, 0, 0, 0, 5, 5, 5, 10, 25]
    assert all(manager.match_tasks([name]) == [name] for name in shots)


def test_an_unknown_task_and_a_missing_adapter_are_named(
    base: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # lm-eval's own index takes ten seconds to make.
    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    monkeypatch.setattr("hf_depthroute.evaluation.harness._manager", lambda *_: manager)
    model = routed(AutoModelForCausalLM.from_pretrained(base), "mlp")
    with pytest.raises(ValueError, match="lm-eval has no task 'nonsense'"):
        evaluate_tasks(model, word_tokenizer(), ["nonsense"])
    with pytest.raises(ValueError, match="needs adapter="):
        DepthRouteLM(str(base))


def test_the_command_prints_a_table_and_writes_lm_evals_results(
    base: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = routed(AutoModelForCausalLM.from_pretrained(base), "mlp")
    model.save_pretrained(tmp_path / "adapter")
    out = tmp_path / "results.json"
    command = [
        "eval",
        "--adapter",
        tmp_path / "adapter",
        "--tasks",
        "small_choice",
        "--include-path",
        tasks,
    ]
    with pytest.raises(SystemExit) as caught:
        options = ["--budgets", "0.3,1", "--json", out, "--limit", "6", "--phases", "prefill"]
        main([str(part) for part in [*command, *options]])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "small_choice" in printed and "acc_norm" in printed and "budget 0.3" in printed
    assert "s / s" not in printed  # one cold run is no measurement of speed
    written = json.loads(out.read_text())
    assert list(written["runs"]) == ["dense", "budget 0.3", "budget 1"]
    dense = written["runs"]["dense"]["lm_eval"]
    assert dense["n-samples"]["small_choice"]["effective"] == 6
    assert "acc,none" in dense["results"]["small_choice"]
    assert [run["phases"] for run in written["runs"].values()] == [None, "prefill", "prefill"]
    assert written["base_mismatch"] is False
    with pytest.raises(SystemExit) as caught:
        main(["eval", "--adapter", str(tmp_path / "adapter")])
    assert caught.value.code == 2
    assert "give one of --dataset and --tasks" in capsys.readouterr().err


def test_the_command_says_that_prompts_were_cut(
    base: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """lm-eval warns of each, among other lines that are not shown."""
    short = tmp_path / "base"
    shutil.copytree(base, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    routed(AutoModelForCausalLM.from_pretrained(short)).save_pretrained(tmp_path / "adapter")
    words = ["eval", str(tmp_path / "adapter"), "--tasks", "small_choice", "--include-path"]
    for limit, said in (("1", False), ("12", True)):  # the first question has two words
        with pytest.raises(SystemExit) as caught:
            main([*words, str(tasks), "--limit", limit, "--budgets", "1"])
        err = capsys.readouterr().err
        assert caught.value.code == 0, err
        assert ("note: some prompts are longer than what the model reads" in err) == said
        assert "Truncating" not in err


def test_a_folder_of_tasks_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["eval", "adapter", "--tasks", "colours", "--include-path", "absent"])
    assert caught.value.code == 2
    assert "error: --include-path absent: no such folder" in capsys.readouterr().err


def lm_eval_program(*words: object) -> subprocess.CompletedProcess[str]:
    """`hf-depthroute lm-eval` in a process of its own,
    where nothing has registered the method with PEFT."""
    command = [sys.executable, "-m", "hf_depthroute", "lm-eval", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | {"PYTHONUTF8": "1"}
    )


@pytest.mark.nightly
def test_lm_evals_own_program_takes_an_adapter(tasks: Path, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    tokenizer = word_tokenizer()  # lm-eval gives a base as many rows as its tokenizer has tokens
    tokenizer.add_tokens([f"unused{number}" for number in range(VOCABULARY - len(tokenizer))])
    tokenizer.save_pretrained(base)
    model = routed(AutoModelForCausalLM.from_pretrained(base), "mlp", budget=0.3)
    model.save_pretrained(tmp_path / "adapter")
    ours = evaluate_tasks(model, word_tokenizer(), ["small_choice"], [0.3], include_path=tasks)[1]
    words = ["--tasks", "small_choice", "--include_path", tasks]
    hf = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={base},peft={tmp_path / 'adapter'}",
        "--batch_size",
        "3",
    ]
    ended = lm_eval_program(*hf, *words, "--output_path", tmp_path / "hf.json")
    assert ended.returncode == 0, ended.stderr
    (written,) = tmp_path.glob("hf*.json")
    assert (
        json.loads(written.read_text())["results"]["small_choice"]["acc,none"]
        == read_scores(ours.results)["small_choice", "acc"][0]
    )
    own = [
        "--model",
        "depthroute",
        "--model_args",
        f"adapter={tmp_path / 'adapter'},pretrained={base},budget=0.3",
    ]
    ended = lm_eval_program("run", *own, *words)
    assert ended.returncode == 0, ended.stderr
    assert "small_choice" in ended.stdout and "depthroute" in ended.stdout


@pytest.mark.parametrize(
    "fields",
    [{"phases": "prefill"}, {"granularity": "sequence", "target": "block"}],
    ids=["prefill", "sequence"],
)
def test_lm_evals_own_program_refuses_batches_whose_padding_would_be_read(
    fields: dict[str, Any], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    routed(AutoModelForCausalLM.from_pretrained(base), "mlp", **fields).save_pretrained(tmp_path)
    for arguments in (
        f"pretrained={base},peft={tmp_path}",
        json.dumps({"pretrained": str(base), "peft": str(tmp_path)}),
    ):
        with pytest.raises(SystemExit) as caught:
            main(
                [
                    "lm-eval",
                    "--model",
                    "hf",
                    "--model_args",
                    arguments,
                    "--tasks",
                    "x",
                    "--batch_size=8",
                ]
            )
        assert caught.value.code == 2
        assert "use --model depthroute --model_args adapter=" in capsys.readouterr().err


def test_a_task_whose_data_are_not_there_is_told_by_the_name_of_its_dataset(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    task = TASK.format(name="far", data="x").replace(
        "dataset_path: json", "dataset_path: me/questions"
    )
    (tmp_path / "far.yaml").write_text(
        task.replace("dataset_kwargs: {data_files: {test: x}}", "") + CHOICE
    )
    routed(AutoModelForCausalLM.from_pretrained(base), "mlp").save_pretrained(tmp_path / "adapter")
    with pytest.raises(SystemExit) as caught:
        main(["eval", str(tmp_path / "adapter"), "--tasks", "far", "--include-path", str(tmp_path)])
    assert caught.value.code == 3
    assert (
        "error: dataset me/questions: not a local path and not in the local cache"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("fields", "words", "refused"),
    [
        ({"phases": "prefill"}, [], "in one pass"),
        ({"phases": "prefill"}, ["--batch_size", "1"], "in one pass"),
        ({"phases": "prefill"}, ["-M", "depthroute"], None),
        ({"granularity": "sequence", "target": "attention"}, [], None),
        ({"granularity": "sequence", "target": "attention"}, ["-b", "8"], "pad without a mask"),
        ({"granularity": "sequence", "target": "attention"}, ["-b=8", "--batch_size=1"], None),
        ({"granularity": "sequence", "target": "attention"}, ["-b8"], "pad without a mask"),
        ({"granularity": "sequence", "target": "attention"}, ["--batch", "8"], "pad without"),
        ({"phases": "prefill"}, ["-Mdepthroute"], None),
        ({"phases": "prefill"}, ["--model"], None),
    ],
)
def test_lm_evals_own_model_is_refused_what_it_reads_otherwise(
    fields: dict[str, Any], words: list[str], refused: str | None, tmp_path: Path
) -> None:
    build_routed("llama", **fields).save_pretrained(tmp_path)
    context = pytest.raises(CliError, match=refused) if refused else nullcontext()
    with context:
        _refuse_padding(["run", "--model_args", f"pretrained=base,peft={tmp_path}", *words])


@pytest.mark.parametrize("words", [["--model", "depthroute"], ["--model", "hf"]])
def test_lm_evals_own_program_names_an_adapter_that_is_not_there(words: list[str]) -> None:
    given = "pretrained=base,peft=./absent,adapter=./absent"
    with pytest.raises(CliError, match=r"adapter \./absent: no such folder") as caught:
        _refuse_padding(["run", "--model_args", given, *words])
    assert caught.value.code == 2


def test_lm_evals_own_program_takes_adapters_of_other_methods(tmp_path: Path) -> None:
    lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(build_base("llama"), lora).save_pretrained(tmp_path)
    _refuse_padding(["run", "--model_args", f"pretrained=base,peft={tmp_path}"])


@pytest.mark.parametrize(
    ("content", "words", "refused"),
    [
        ({"model": "hf", "model_args": {"pretrained": "base", "peft": "IT"}}, [], True),
        ({"model_args": "pretrained=base,peft=IT", "batch_size": 1}, [], True),
        ({"model": "depthroute", "model_args": {"adapter": "IT"}}, [], False),
        ({"model": "hf", "model_args": {"peft": "IT"}}, ["--model", "depthroute"], False),
        # The command line's replace those of the file.
        ({"model_args": {"peft": "IT"}}, ["--model_args", "pretrained=base"], False),
        ({"model": "depthroute"}, ["--model_args", "pretrained=base,peft=IT"], False),
        (["no mapping"], [], False),
    ],
)
def test_a_file_that_names_the_model_is_read_too(
    content: Any, words: list[str], refused: bool, tmp_path: Path
) -> None:
    build_routed("llama", phases="prefill").save_pretrained(tmp_path / "it")
    file, place = tmp_path / "run.yaml", str(tmp_path / "it")
    file.write_text(json.dumps(content).replace("IT", place))  # JSON is YAML
    words = [word.replace("IT", place) for word in words]
    for option in (["--config", str(file)], [f"--config={file}"], ["-C", str(file)]):
        context = pytest.raises(CliError, match="in one pass") if refused else nullcontext()
        with context:
            _refuse_padding(["run", *option, *words])


def test_the_batch_size_of_a_file_counts(tmp_path: Path) -> None:
    build_routed("llama", granularity="sequence", target="attention").save_pretrained(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(f"model_args: {{peft: {tmp_path}}}\nbatch_size: 8\n")
    with pytest.raises(CliError, match="pad without a mask"):
        _refuse_padding(["--config", str(file)])
    _refuse_padding(["--config", str(file), "--batch_size", "1"])
    _refuse_padding(["--config", str(tmp_path / "missing.yaml")])
    file.write_text("tasks: &tasks [piqa]\nsame: *tasks\nmodel_args: pretrained=base\n")
    _refuse_padding(["--config", str(file)])  # no adapter: lm-eval reads it as it likes
