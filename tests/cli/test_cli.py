"""The command line: one line and the right exit code for every mistake,
and a whole path from text to text."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import safetensors.torch
import torch
import transformers
from hub_repository import Repository
from hub_server import TOKEN, HubServer
from models import build_base, routed
from places import ROOT
from text_models import save_base, word_tokenizer, write_text

from hf_depthroute import DepthRouteConfig, __version__, get_depth_routed_model
from hf_depthroute.cli import errors, main
from hf_depthroute.cli.loading import explained
from hf_depthroute.cli.output import made
from hf_depthroute.routing.stack import routings_of
from hf_depthroute.routing.thresholds import NOT_FITTED
from hf_depthroute.routing.trace import count_routes

PROMPT = ("--prompt", "the", "--max-new-tokens", 4)


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The only line on stderr, without its `error: `."""
        (line,) = self.err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`run("train", "--model", folder) -> Ended`, in this process."""
    level = transformers.logging.get_verbosity()

    def call(*arguments: object) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    yield call
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A consequential adapter of `base`, not trained by the command line."""
    model = routed(transformers.AutoModelForCausalLM.from_pretrained(base))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def train_arguments(base: Path, text: Path, tmp_path: Path) -> list[object]:
    """A run of two steps into `tmp_path / "out"`."""
    return [
        *("train", "--model", base, "--dataset", text, "--out", tmp_path / "out"),
        *("--steps", 2, "--batch-size", 2, "--length", 16, "--calibration-blocks", 4),
    ]


def write_yaml(folder: Path, content: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(content)
    return path


def started(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hf_depthroute", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell ignores Ctrl-C, and its children inherit that.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


# The whole path


def test_train_eval_generate(run: Run, base: Path, text: Path, tmp_path: Path) -> None:
    out, rows_file = tmp_path / "deep" / "out", tmp_path / "rows.json"
    trained = run(
        *(
            "train",
            "--model",
            base,
            "--dataset",
            text,
            "--split",
            "train[:80%]",
            "--validation-split",
            "train[80%:]",
        ),
        *(
            "--out",
            out,
            "--layers",
            "1,2,3",
            "--budget",
            "0.5",
            "--steps",
            8,
            "--batch-size",
            4,
            "--length",
            16,
        ),
        *("--logging-steps", 4, "--lr", "2e-3"),
    )
    assert trained.code == 0, trained.err
    assert "validation loss: dense" in trained.out
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "training.json",
    } <= {path.name for path in out.iterdir()}
    assert [path.name for path in out.parent.iterdir()] == ["out"]

    record = json.loads((out / "training.json").read_text())
    assert record["arguments"]["layers"] == "1,2,3"
    assert [entry["step"] for entry in record["log_history"] if "loss_budget" in entry] == [4, 8]
    assert record["seconds"] > 0
    assert record["versions"]["torch"] == torch.__version__
    assert set(record["calibrated_full_ratio"]) == {"1", "2", "3"}

    evaluated = run(
        *(
            "eval",
            "--adapter",
            out,
            "--dataset",
            text,
            "--length",
            16,
            "--budgets",
            "0.25,1",
            "--json",
            rows_file,
        )
    )
    assert evaluated.code == 0, evaluated.err
    rows = json.loads(rows_file.read_text())["rows"]
    assert [(row["budget"], row["rule"]) for row in rows] == [
        *[(1.0, "dense"), (0.25, "topk"), (0.25, "threshold"), (1.0, "topk"), (1.0, "threshold")]
    ]
    assert rows[0]["loss"] == rows[-1]["loss"]
    for row in rows:
        assert f"{row['loss']:.4f}" in evaluated.out

    prompt = "the cat sat"
    wanted = transformers.AutoModelForCausalLM.from_pretrained(base).generate(
        **word_tokenizer()(prompt, return_tensors="pt", return_token_type_ids=False),
        max_new_tokens=6,
        do_sample=False,
    )
    for extra in (["--full"], ["--budget", "1"]):
        generated = run(
            "generate", "--adapter", out, "--prompt", prompt, "--max-new-tokens", 6, *extra
        )
        assert generated.code == 0, generated.err
        assert (
            generated.out.strip()
            == word_tokenizer().decode(wanted[0], skip_special_tokens=True).strip()
        )
        assert re.fullmatch(
            r"\d+ tokens, [\d.]+ tokens/s, full ratio 1\.000( of the routed layers, 1\.000 of all "
            r"\d)?\n",
            generated.err,
        )


def test_generate_reports_the_share_of_all_steps(run: Run, adapter: Path) -> None:
    ended = run(
        "generate",
        "--adapter",
        adapter,
        "--prompt",
        "the cat sat on the mat",
        "--max-new-tokens",
        20,
    )
    assert ended.code == 0, ended.err
    ratio = float(re.search(r"full ratio ([\d.]+)", ended.err)[1])
    assert 0 < ratio < 1
    of_all, depth = re.search(r"of the routed layers, ([\d.]+) of all (\d)", ended.err).groups()
    # As `fit --keep` counts.
    assert float(of_all) == pytest.approx((3 * ratio + int(depth) - 3) / int(depth), abs=1e-3)
    assert ratio * 3 % 1 != 0  # not the three layers' decisions on one last token


def test_generate_takes_its_time_without_the_count(
    run: Run, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios, generate = [], peft.PeftModelForCausalLM.generate

    def spied(model: peft.PeftModel, **arguments: object) -> object:
        assert not any(routing.state.settings.recorders for routing in routings_of(model))
        ids = generate(model, **arguments)
        with count_routes(model) as counter:
            assert torch.equal(generate(model, **arguments), ids)
        ratios.append(sum(counter.full_ratio().values()) / len(counter.full_ratio()))
        return ids

    monkeypatch.setattr(peft.PeftModelForCausalLM, "generate", spied)
    for phases in ("all", "prefill"):
        ended = run(
            "generate",
            adapter,
            "--prompt",
            "the cat sat",
            "--max-new-tokens",
            12,
            "--phases",
            phases,
        )
        assert f"full ratio {ratios[-1]:.3f}" in ended.err


def test_sampling_repeats_with_its_seed_and_changes_with_another(run: Run, adapter: Path) -> None:
    sample = [
        "generate",
        "--adapter",
        adapter,
        "--prompt",
        "the",
        "--max-new-tokens",
        16,
        "--sample",
        "--seed",
    ]
    assert run(*sample, 1).out == run(*sample, 1).out != run(*sample, 2).out


def test_generate_reads_stdin(
    run: Run, adapter: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("the cat\n")
    with (tmp_path / "prompt").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        ended = run("generate", "--adapter", adapter, "--max-new-tokens", 2)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("the cat")


def test_eval_calibrates_on_the_split_it_is_told(
    run: Run, adapter: Path, text: Path, tmp_path: Path
) -> None:
    ratios = []
    for extra in ([], ["--calibrate-on", "train[:50%]"]):
        path = tmp_path / "rows.json"
        common = ("--length", 16, "--budgets", "0.5", "--split", "train[:50%]", "--json", path)
        ended = run("eval", "--adapter", adapter, "--dataset", text, *common, *extra)
        assert ended.code == 0, ended.err
        ratios.append(json.loads(path.read_text())["rows"][2]["full_ratio"])
    assert abs(ratios[1] - 0.5) < min(0.03, abs(ratios[0] - 0.5))


@pytest.mark.parametrize(
    "extra",
    [
        ["--dtype", "bfloat16"],
        ["--streaming"],
        ["--gate", "jepa", "--branch", "none", "--gate-input", "residual", "--accumulate", 2],
        ["--report-to", "tensorboard", "--logging-steps", 1],
        [
            "--gate", "jepa", "--jepa-targets", "deranged", "--oracle", "on_policy",
            "--oracle-warmup", 0, "--oracle-interval", 1, "--util-weight", 0.5, "--rank-weight",
            0.1, "--cgs-weight", 0.5, "--cgs-warmup", 0, "--z-weight", 0.1, "--distill-weight", 1.0,
            "--logging-steps", 1,
        ],
    ],
    ids=["bfloat16", "streaming", "jepa", "tensorboard", "every-loss"],
)  # fmt: skip
def test_train_variants_save_a_loadable_adapter(
    extra: list[object], run: Run, train_arguments: list[object], base: Path, tmp_path: Path
) -> None:
    ended = run(*train_arguments, *extra)
    assert ended.code == 0, ended.err
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert peft.PeftModel.from_pretrained(model, tmp_path / "out")
    assert bool(list((tmp_path / "out").rglob("events.out.tfevents*"))) == ("tensorboard" in extra)
    logged = json.loads((tmp_path / "out" / "training.json").read_text())["log_history"]
    names = {name for entry in logged for name in entry}
    assert ({"loss_util", "loss_rank", "loss_cgs", "loss_z", "loss_distill"} <= names) == (
        "--oracle" in extra
    )


def test_the_same_seed_trains_the_same_adapter(
    run: Run, train_arguments: list[object], tmp_path: Path
) -> None:
    weights = []
    for seed in (1, 1, 2):
        assert run(*train_arguments, "--seed", seed, "--overwrite").code == 0
        weights.append((tmp_path / "out" / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_card_refuses_what_was_measured_on_another_base(
    run: Run, adapter: Path, text: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(
        json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"], other
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(other)
    for parameter in model.parameters():
        parameter.data += 0.5
    model.save_pretrained(other)
    on_other = ("--model", other, "--allow-base-mismatch", "--json", tmp_path / "other.json")
    short = ("--length", 8, "--budgets", "0.5")
    assert (
        run("eval", adapter, "--dataset", text, *short, "--json", tmp_path / "own.json").code == 0
    )
    assert run("card", adapter, "--results", tmp_path / "own.json").code == 0
    for command in (
        ("eval", adapter, "--dataset", text),
        ("bench", adapter, "--repeats", 1, "--decode-steps", 1),
    ):
        assert run(*command, *short, *on_other).code == 0
        ended = run("card", adapter, "--results", tmp_path / "other.json")
        assert (
            ended.code == errors.USAGE
            and "measured on another base than this adapter's" in ended.error
        )


def test_bench_prints_and_writes_both_phases(run: Run, adapter: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    sizes = ("--batch", 1, "--length", 8, "--decode-steps", 2, "--repeats", 1, "--budgets", "0.5")
    ended = run("bench", "--adapter", adapter, *sizes, "--json", path)
    assert ended.code == 0, ended.err
    assert {"prefill", "decode", "machine", "setting"} <= set(json.loads(path.read_text()))
    assert "prefill" in ended.out and "decode" in ended.out


def test_bench_measures_every_size(run: Run, adapter: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    sizes = (
        "--batch",
        2,
        "--length",
        "4,8",
        "--decode-batch",
        "1,2",
        "--decode-steps",
        1,
        "--repeats",
        1,
    )
    ended = run("bench", adapter, *sizes, "--budgets", "0.5", "--out", path)
    assert ended.code == 0, ended.err
    found = json.loads(path.read_text())["measurements"]
    assert [(m["case"], m["batch"], m["length"]) for m in found] == [
        ("prefill", 2, 4), ("prefill", 2, 8),
        *(("decode", batch, length) for batch in (1, 2) for length in (4, 8)),
    ]  # fmt: skip


def test_a_command_that_moved_says_where_it_is(run: Run) -> None:
    for words in (("study",), ("study", "study.yaml", "--out", "results")):
        ended = run(*words)
        assert ended.code == errors.USAGE and "python recipes/study run STUDY.yaml" in ended.error
    assert "study" not in run("--help").out.split("Commands:")[1]


# YAML


def test_yaml_sets_options_and_the_command_line_overrides_them(
    run: Run, train_arguments: list[object], tmp_path: Path
) -> None:
    config = write_yaml(
        tmp_path,
        "budget: 0.75\nlayers: [1, 3]\nlr: 2e-4\ngate-hidden: 010\nseed: 5\noverwrite: true\n",
    )
    assert run(*train_arguments, "--config", config, "--seed", 7).code == 0
    arguments = json.loads((tmp_path / "out" / "training.json").read_text())["arguments"]
    wanted = {
        "budget": 0.75,
        "layers": "1,3",
        "lr": 2e-4,
        "gate_hidden": 10,
        "seed": 7,
        "overwrite": True,
    }
    assert {name: arguments[name] for name in wanted} == wanted
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (saved["layers"], saved["budget"], saved["gate_hidden"]) == ([1, 3], 0.75, 10)


def test_yaml_can_give_required_options(
    run: Run, train_arguments: list[object], tmp_path: Path
) -> None:
    command, *rest = map(str, train_arguments)
    keys = "".join(
        f"{name.removeprefix('--')}: {value}\n" for name, value in zip(rest[::2], rest[1::2])
    )
    assert run(command, "--config", write_yaml(tmp_path, keys)).code == 0


@pytest.mark.parametrize(
    "content, message",
    [
        ("stepz: 3", "unknown key 'stepz'; did you mean 'steps'?"),
        ("config: other.yaml", "unknown key 'config'"),
        ("steps: 3\nsteps: 4", "key 'steps' appears twice"),
        ("batch-size: 3\nbatch_size: 4", "appears twice"),
        ("steps: many", "Invalid value 'many' for '--steps'"),
        ("steps: 2.5", "Invalid value '2.5' for '--steps'"),
        ("steps: 0", "Invalid value '0' for '--steps'"),
        ("steps: 1:30", "Invalid value '1:30' for '--steps'"),
        ("lr: true", "lr=True"),
        ("split: yes", "quote it"),
        ("streaming: 1", "streaming=1 must be true or false"),
        ("gate: {kind: mlp}", "gate must be a single value"),
        ("layers: [a, b]", "layers must be a single value or a list of numbers"),
        ("- steps", "must be a mapping"),
        ("gate: [", "not valid YAML"),
        ("gate: " + "[" * 5000, "not valid YAML"),
        ("gate: &a mlp\nbranch: *a", "aliases are not supported"),
        ("gate: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("gate: mlp\n" + "#" * (1 << 20), "larger than 1 MiB"),
    ],
)
def test_yaml_is_refused_also_where_the_command_line_overrides_it(
    content: str, message: str, run: Run, train_arguments: list[object], tmp_path: Path
) -> None:
    ended = run(*train_arguments, "--lr", "1e-4", "--config", write_yaml(tmp_path, content))
    assert ended.code == errors.USAGE
    assert message in ended.error
    assert "config.yaml" in ended.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["FILE", "[FILE]", "[FILE, FILE]"])
def test_yaml_gives_an_option_that_may_be_given_several_times(
    value: str, run: Run, adapter: Path, text: Path, tmp_path: Path
) -> None:
    result = tmp_path / "eval.json"
    assert (
        run(
            "eval", adapter, "--dataset", text, "--length", 16, "--budgets", 0.5, "--out", result
        ).code
        == 0
    )
    ended = run(
        "card",
        adapter,
        "--config",
        write_yaml(tmp_path, f"results: {value.replace('FILE', str(result))}\n"),
    )
    assert ended.code == 0, ended.err
    shown = (adapter / "README.md").read_text().count("| causal threshold |")
    assert shown == value.count("FILE")
    ended = run("card", adapter, "--config", write_yaml(tmp_path, "results: {a: b}\n"))
    assert ended.code == errors.USAGE and "results must be a single value" in ended.error


def test_a_missing_yaml_file_is_named(
    run: Run, train_arguments: list[object], tmp_path: Path
) -> None:
    ended = run(*train_arguments, "--config", tmp_path / "none.yaml")
    assert ended.code == errors.USAGE
    assert "none.yaml: No such file" in ended.error


# Mistakes: exit code 2


@pytest.mark.parametrize(
    "extra, message",
    [
        (["--budget", "0"], "budget=0.0 must be a finite number in (0, 1]"),
        (["--budget", "nan"], "--budget nan"),
        (["--budget", "half"], "Invalid value 'half' for '--budget'"),
        (["--layers", "7"], "7 is out of range; the model has layers 0 to 3"),
        (["--layers", "-1"], "layers=[-1]"),
        (["--layers", "last:9"], "the model has only 4 decoder layers"),
        (["--layers", "some"], "'last:N', 'last:half', 'every:N'"),
        (["--gate", "magic"], "use one of: mlp, jepa"),
        (["--branch-rank", "0"], "branch_rank=0"),
        (["--budget-weight", "-1"], "budget_weight=-1.0"),
        (
            ["--oracle", "later"],
            "oracle='later' is not supported; use one of: none, all_full, on_policy",
        ),
        (["--oracle-interval", "0"], "oracle_interval=0 must be at least 1"),
        (["--lr", "nan"], "--lr nan"),
        (["--dtype", "int8"], "use one of: float32, bfloat16"),
        (["--length", "4096"], "the model has 64 positions; use at most 64"),
        (["--steps", "0"], "Invalid value '0' for '--steps'"),
        (["--report-to", "smoke-signals"], "smoke-signals is not supported"),
        (["--stepz", "3"], "No such option: --stepz"),
        (["--dataset", "absent.txt"], "dataset absent.txt: no such file"),
        (["--eval-dataset", "absent.txt"], "dataset absent.txt: no such file"),
        (["--split", "test"], "split"),
        (["--column", "body"], "no column 'body'; it has text"),
        (["--length", "60", "--split", "train[:2]"], "shorter than one block of 60 tokens"),
        (["--model", "/absent/model"], "model /absent/model: no such folder"),
        (["--model", "."], "cannot be loaded"),
    ],
)
def test_a_mistake_ends_training_before_it_starts(
    extra: list[str], message: str, run: Run, train_arguments: list[object], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    ended = run(*train_arguments, *extra)
    assert ended.code == errors.USAGE
    assert message in ended.error
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_family_is_refused_with_the_supported_ones(
    run: Run, train_arguments: list[object], tmp_path: Path
) -> None:
    folder = tmp_path / "bloom"
    transformers.BloomConfig(hidden_size=8, n_layer=1, n_head=1).save_pretrained(folder)
    ended = run(*train_arguments, "--model", folder)
    assert ended.code == errors.USAGE
    assert "model type 'bloom' is not supported" in ended.error
    assert "llama" in ended.error


def test_a_tokenizer_of_another_model_is_refused(
    run: Run, train_arguments: list[object], tmp_path: Path
) -> None:
    folder = save_base(tmp_path / "other")
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([f"word{i}" for i in range(100)])
    tokenizer.save_pretrained(folder)
    ended = run(*train_arguments, "--model", folder)
    assert ended.code == errors.USAGE
    assert "does not fit the model's vocabulary of 64" in ended.error


@pytest.mark.parametrize("missing", ["--model", "--dataset", "--out"])
def test_a_missing_option_is_named(missing: str, run: Run, train_arguments: list[object]) -> None:
    index = train_arguments.index(missing)
    ended = run(*train_arguments[:index], *train_arguments[index + 2 :])
    assert ended.code == errors.USAGE
    assert f"Missing option '{missing}'" in ended.error


def test_a_mistyped_command_gets_a_suggestion(run: Run) -> None:
    ended = run("trian")
    assert ended.code == errors.USAGE
    assert "'train'" in ended.error


@pytest.mark.parametrize(
    "extra, message",
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "the", "--temperature", "0"], "--temperature 0.0"),
        (["--prompt", "the", "--top-p", "2"], "--top-p 2.0"),
        (["--prompt", "the", "--temperature", "0.5"], "no effect without --sample"),
        (["--prompt", "the", "--top-p", "0.9", "--greedy"], "no effect without --sample"),
        (["--prompt", "the", "--budget", "2"], "budget=2.0"),
        (["--prompt", "the", "--budget", "0.5", "--full"], "no effect with --full"),
        (["--prompt", "the", "--max-new-tokens", "1000"], "the model has 64 positions"),
    ],
)
def test_generate_refuses(extra: list[str], message: str, run: Run, adapter: Path) -> None:
    ended = run("generate", "--adapter", adapter, *extra)
    assert ended.code == errors.USAGE
    assert message in ended.error


@pytest.mark.parametrize(
    "budgets, message", [("0.5,x", "such as 0.25,0.5"), ("0,0.5", "budget=0.0"), ("", "such as")]
)
def test_eval_refuses_budgets(
    budgets: str, message: str, run: Run, adapter: Path, text: Path
) -> None:
    ended = run("eval", "--adapter", adapter, "--dataset", text, "--budgets", budgets)
    assert ended.code == errors.USAGE
    assert message in ended.error


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["bench", "--compare", "a", "b", "--threads", "1"],
            "bench: --threads has no effect with --compare",
        ),
        (
            ["bench", "ADAPTER", "--cases", "decode", "--decode-steps", "0"],
            "leaves nothing of --cases decode",
        ),
        (
            ["eval", "ADAPTER", "--dataset", "TEXT", "--limit", "3"],
            "eval: --limit has no effect without --tasks",
        ),
        (
            ["eval", "ADAPTER", "--dataset", "TEXT", "--num-fewshot", "3"],
            "--num-fewshot has no effect",
        ),
        (
            ["eval", "ADAPTER", "--dataset", "TEXT", "--include-path", "."],
            "--include-path has no effect",
        ),
        (
            ["eval", "ADAPTER", "--tasks", "piqa", "--blocks", "3"],
            "eval: --blocks has no effect with --tasks",
        ),
        (
            ["eval", "ADAPTER", "--dataset", "TEXT", "--calibration-blocks", "3"],
            "eval: --calibration-blocks has no effect without --calibrate-on",
        ),
        (
            ["generate", "ADAPTER", "--prompt", "the", "--temperature", "0.5", "--top-p", "0.9"],
            "generate: --temperature and --top-p have no effect without --sample",
        ),
        (
            ["bench", "ADAPTER", "--cases", "prefill", "--decode-steps", "2"],
            "bench: --decode-steps has no effect without --cases decode",
        ),
        (
            ["bench", "ADAPTER", "--decode-steps", "0", "--decode-batch", "2"],
            "bench: --decode-batch has no effect with --decode-steps 0",
        ),
        (
            ["bench", "ADAPTER", "--cases", "decode", "--batch", "2"],
            "bench: --batch has no effect without --cases prefill",
        ),
        (
            ["report", "ADAPTER", "--dataset", "TEXT", "--max-new-tokens", "3"],
            "report: --max-new-tokens has no effect without --prompt",
        ),
        (
            ["report", "ADAPTER", "--dataset", "TEXT", "--no-speed", "--repeats", "3"],
            "report: --repeats has no effect with --bench or --no-speed",
        ),
        (
            ["fit", "--model", "x", "--dataset", "TEXT", "--out", "x", "--keep-of", "time"],
            "fit: --keep-of has no effect without --phases prefill",
        ),
        (
            ["fit", "--model", "x", "--dataset", "TEXT", "--out", "x", "--memory-slots", "100"],
            "fit: --memory-slots has no effect without --branch memory",
        ),
    ],
)
def test_an_option_that_nothing_looks_at_is_refused(
    arguments: list[str], message: str, run: Run, adapter: Path, text: Path
) -> None:
    places = {"ADAPTER": adapter, "TEXT": text}
    ended = run(*(places.get(word, word) for word in arguments))
    assert ended.code == errors.USAGE
    assert message in ended.error


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "ADAPTER", "--dataset", "TEXT", "--length", 16],
        ["report", "ADAPTER", "--dataset", "TEXT", "--length", 16],
        ["generate", "ADAPTER", *PROMPT, "--budget", 0.5],
        ["generate", "ADAPTER", *PROMPT, "--lossless", "--draft-budget", 0.5],
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:1] + arguments[-2:])),
)
def test_a_budget_of_an_adapter_that_was_never_fitted_is_refused(
    arguments: list[object], run: Run, base: Path, text: Path, tmp_path: Path
) -> None:
    fresh = get_depth_routed_model(
        transformers.AutoModelForCausalLM.from_pretrained(base), DepthRouteConfig()
    )
    fresh.save_pretrained(tmp_path / "adapter")
    places = {"ADAPTER": tmp_path / "adapter", "TEXT": text}
    ended = run(*(places.get(str(word), word) for word in arguments))
    assert ended.code == errors.USAGE
    assert "its thresholds were never fitted" in ended.error
    if arguments[0] == "eval":
        ended = run(*(places.get(str(word), word) for word in arguments), "--calibrate-on", "train")
        assert ended.code == 0, ended.error


def test_a_warning_of_the_library_is_said_as_a_note_by_a_command(
    run: Run, base: Path, tmp_path: Path
) -> None:
    """`generate` at the adapter's own budget, whose thresholds nothing fitted: Python warns."""
    fresh = get_depth_routed_model(
        transformers.AutoModelForCausalLM.from_pretrained(base), DepthRouteConfig()
    )
    fresh.save_pretrained(tmp_path / "adapter")
    ended = run("generate", tmp_path / "adapter", *PROMPT)
    assert ended.code == 0
    note, report = ended.err.splitlines()
    assert note == f"note: {NOT_FITTED}"
    assert report.startswith("4 tokens, ")


def test_weights_that_the_files_of_a_base_lack_are_named(
    run: Run, base: Path, adapter: Path, tmp_path: Path
) -> None:
    """transformers draws them at random; of these, the adapter's check samples none."""
    shutil.copytree(base, tmp_path / "base")
    weights = safetensors.torch.load_file(base / "model.safetensors")
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("down", "gate")]
    kept = {name: weight for name, weight in weights.items() if name not in names}
    safetensors.torch.save_file(kept, tmp_path / "base/model.safetensors", {"format": "pt"})
    ended = run("generate", adapter, "--model", tmp_path / "base", *PROMPT)
    assert ended.code == 0
    note, _ = ended.err.splitlines()
    assert note.endswith(f"its files lack are random, 2 in all: {', '.join(names)}")
    assert "note: " not in run("generate", adapter, *PROMPT).err


def test_a_card_says_that_it_leaves_out_a_record_of_another_form(run: Run, adapter: Path) -> None:
    (adapter / "training.json").write_text('{"calibrated_full_ratio": "much"}')
    ended = run("card", adapter)
    assert ended.code == 0
    assert ended.err.startswith("note: left out of the model card: training.json, which is not in")


def test_an_adapter_given_as_model_is_recognised(
    run: Run, train_arguments: list[object], adapter: Path
) -> None:
    ended = run(*train_arguments, "--model", adapter)
    assert ended.code == errors.USAGE
    assert "pass it as --adapter" in ended.error


# The output folder


def test_an_existing_folder_is_kept_without_overwrite(
    run: Run, train_arguments: list[object], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    assert "--overwrite" in run(*train_arguments).error
    assert "holds files but no adapter" in run(*train_arguments, "--overwrite").error
    assert (tmp_path / "out" / "notes").read_text() == "mine"


def test_overwrite_replaces_the_files_of_an_adapter_and_no_others(
    run: Run, train_arguments: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that a person works in, as `--out .`"""
    assert run(*train_arguments).code == 0
    out = tmp_path / "out"
    own = {
        ".git/config": "[core]",
        "text.txt": "the cat sat",
        "data/rows.jsonl": "{}",
        "runs/run-1/events": "x",
    }
    for name, content in own.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(content)
    weights = (out / "adapter_model.safetensors").read_bytes()
    monkeypatch.chdir(out)
    ended = run(*train_arguments, "--out", ".", "--overwrite", "--seed", 3)
    assert ended.code == 0, ended.err
    assert {name: (out / name).read_text() for name in own} == own
    assert (out / "adapter_model.safetensors").read_bytes() != weights
    assert json.loads((out / "training.json").read_text())["arguments"]["seed"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert run("doctor", ".").code == 0


class SmallDisk(io.RawIOBase):
    """A file on a disk that holds `room` bytes more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)


@pytest.mark.parametrize("room", [0, 100, 4096, 70_000])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_disk_that_is_full_inside_torchs_writer_is_named_so(room: int, zipped: bool) -> None:
    """It goes on after the first error, and ends with one of its own."""
    states = {f"state{number}": torch.zeros(4096) for number in range(8)}
    with pytest.raises((OSError, RuntimeError)) as caught:
        torch.save(states, SmallDisk(room), _use_new_zipfile_serialization=zipped)
    code, said = errors.describe(caught.value)
    assert code == errors.RESOURCES and said.startswith("disk full")


@pytest.mark.parametrize(
    "failure, code",
    [
        (OSError(errno.ENOSPC, "No space left on device", "weights"), errors.RESOURCES),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            ),
            errors.RESOURCES,
        ),
        (KeyboardInterrupt(), errors.INTERRUPTED),
        (ZeroDivisionError("unforeseen"), errors.OTHER),
    ],
    ids=["disk", "memory", "ctrl-c", "bug"],
)
@pytest.mark.parametrize("moment", ["training", "saving"])
def test_a_failure_leaves_the_earlier_adapter_and_nothing_else(
    failure: BaseException, code: int, moment: str, run: Run, train_arguments: list[object],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(self: object, *args: object, **kwargs: object) -> None:
        raise failure

    owner, method = {
        "training": (transformers.Trainer, "training_step"),
        "saving": (peft.PeftModel, "save_pretrained"),
    }[moment]
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fail)
        ended = run(*train_arguments)
        assert ended.code == code
        assert ended.error
        assert list(tmp_path.iterdir()) == []

    assert run(*train_arguments).code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(owner, method, fail)
    assert run(*train_arguments, "--overwrite", "--seed", 3).code == code
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_names_the_path_and_the_size(
    run: Run, train_arguments: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, *args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(peft.PeftModel, "save_pretrained", fail)
    ended = run(*train_arguments)
    assert ended.code == errors.RESOURCES
    assert re.search(
        rf"{tmp_path / 'out'}: disk full; the adapter needs about [\d,]+ bytes", ended.error
    )


def test_a_folder_that_stays_empty_is_removed_when_the_work_fails(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out"
    with pytest.raises(ZeroDivisionError), made(out):
        assert out.is_dir()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), made(out):
        (out / "checkpoint").touch()
        raise ZeroDivisionError
    assert [path.name for path in out.iterdir()] == ["checkpoint"]


def test_a_killed_training_leaves_no_adapter(train_arguments: list[object], tmp_path: Path) -> None:
    processes = {}
    try:
        for number in (signal.SIGINT, signal.SIGKILL):
            endless = (
                "--steps",
                10**6,
                "--logging-steps",
                1,
                "--out",
                tmp_path / number.name / "out",
            )
            processes[number] = started(*train_arguments, *endless)
        ended = {}
        for number, process in processes.items():
            assert process.stdout is not None
            assert any(line.startswith("step ") for line in process.stdout)  # training has begun
            process.send_signal(number)
            out, err = process.communicate(timeout=200)
            ended[number] = Ended(process.returncode, out, err)
    finally:
        for process in processes.values():
            process.kill()

    interrupted, killed = ended[signal.SIGINT], ended[signal.SIGKILL]
    assert interrupted.code == errors.INTERRUPTED
    assert interrupted.err.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in interrupted.out + interrupted.err
    assert not (tmp_path / "SIGINT").exists()
    assert killed.code == -signal.SIGKILL
    assert list((tmp_path / "SIGKILL" / "out").iterdir()) == []


# Adapters that do not fit: exit code 4


def truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:500])


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    "damage, message",
    [
        (truncate, "corrupt"),
        (
            lambda folder: (folder / "adapter_model.safetensors").unlink(),
            "no adapter_model.safetensors",
        ),
        (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{"),
            "adapter_config.json is corrupt",
        ),
        (change_config(peft_type="LORA"), "a LORA adapter, not a depth-routed one"),
        (change_config(peft_type="LATER"), "peft_type 'LATER' is unknown"),
        (change_config(budget=0), "budget=0"),
        (change_config(layers=[77]), "layers=[77]"),
        (change_config(gate_hidden=3), "shape"),
    ],
    ids=[
        "truncated",
        "no weights",
        "no config",
        "json",
        "lora",
        "type",
        "budget",
        "layers",
        "shape",
    ],
)
def test_a_damaged_adapter_is_named(
    damage: Callable[[Path], object], message: str, run: Run, adapter: Path, text: Path
) -> None:
    damage(adapter)
    for command in (
        ["eval", "--dataset", text, "--length", 16],
        ["generate", "--prompt", "the", "--max-new-tokens", 4],
    ):
        ended = run(*command, "--adapter", adapter)
        assert ended.code == errors.ADAPTER
        assert message in ended.error
        assert str(adapter) in ended.error


def test_an_adapter_of_another_base_is_refused(run: Run, adapter: Path, tmp_path: Path) -> None:
    other = save_base(tmp_path / "other", "mistral")
    ended = run("generate", "--adapter", adapter, "--model", other, *PROMPT)
    assert ended.code == errors.ADAPTER
    assert "another base model" in ended.error


def test_an_adapter_that_names_no_base_asks_for_it(run: Run, adapter: Path) -> None:
    change_config(base_model_name_or_path=None)(adapter)
    ended = run("generate", "--adapter", adapter, "--prompt", "the")
    assert ended.code == errors.USAGE
    assert "pass --model" in ended.error


ADAPTER_COMMANDS = {
    "eval": ["--dataset", "text"],
    "bench": [],
    "generate": ["--prompt", "the"],
    "report": ["--dataset", "text"],
    "card": [],
    "doctor": [],
    "serve": ["--port", "0"],
}


@pytest.mark.parametrize("command", ADAPTER_COMMANDS)
def test_every_command_names_its_adapter_by_position_or_by_the_older_option(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: True)
    rest = ADAPTER_COMMANDS[command]
    for words in (
        ["./absent", *rest],
        ["--adapter", "./absent", *rest],
        [*rest, "--adapter", "./absent"],
    ):
        ended = run(command, *words)
        assert (ended.code, "adapter ./absent: " in ended.error) == (errors.USAGE, True), (
            ended.error
        )
    ended = run(command, "./absent", *rest, "--adapter", "./other")
    assert ended.code == errors.USAGE
    assert "./absent and --adapter ./other" in ended.error


@pytest.mark.parametrize("command", ["eval", "generate", "card", "doctor", "serve"])
def test_a_command_without_an_adapter_says_how_to_name_one(command: str, run: Run) -> None:
    ended = run(command)
    assert ended.code == errors.USAGE
    assert f"no adapter; name its folder or Hub id: hf-depthroute {command} ADAPTER" in ended.error


def test_serve_wants_its_adapter_before_the_options_of_the_server(run: Run) -> None:
    ended = run("serve", "--port", "0", "adapter")
    assert (ended.code, "before --port: hf-depthroute serve ADAPTER --port" in ended.error) == (
        errors.USAGE,
        True,
    )


def test_out_is_where_the_result_goes_and_json_its_older_spelling(run: Run, tmp_path: Path) -> None:
    printed = run("families").out
    for option in ("--out", "--json"):
        assert run("families", option, tmp_path / f"{option}.json").out == printed
    whole = run("families", "--out", "-").out
    assert whole == (tmp_path / "--out.json").read_text() == (tmp_path / "--json.json").read_text()
    assert json.loads(whole)["families"]


def test_eval_writes_its_result_alone_to_stdout(run: Run, adapter: Path, text: Path) -> None:
    ended = run(
        "eval",
        adapter,
        "--dataset",
        text,
        "--length",
        16,
        "--blocks",
        2,
        "--budgets",
        "0.5",
        "--out",
        "-",
    )
    assert ended.code == 0, ended.err
    assert [row["rule"] for row in json.loads(ended.out)["rows"]] == ["dense", "topk", "threshold"]


@pytest.mark.parametrize(
    "command", [["eval", "./absent", "--dataset", "x"], ["bench", "./absent"], ["families"]]
)
def test_a_result_that_cannot_be_written_is_refused_before_the_work(
    command: list[str], run: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "x.json", "no file can be made in"),
    ):
        for option in ("--out", "--json"):
            ended = run(*command, option, path)
            assert (ended.code, ended.out) == (errors.USAGE, "")
            assert ended.error.startswith(f"--out {path}: {message}")


@pytest.mark.parametrize("key", ["out", "json", "json_file"])
def test_a_yaml_file_spells_options_as_the_command_line_does(
    key: str, run: Run, tmp_path: Path
) -> None:
    ended = run(
        "eval",
        "./absent",
        "--dataset",
        "x",
        "--config",
        write_yaml(tmp_path, f"{key}: {tmp_path}\n"),
    )
    assert ended.error.startswith(f"--out {tmp_path}: is a folder")


@pytest.mark.parametrize(
    ("content", "message"),
    [("adapter: 2.10\n", "adapter 2.10: "), ("adapter: a\nbudgets: [0.50, 2.0]\n", "0.50,2.0: ")],
)
def test_a_number_of_a_yaml_file_stays_as_it_is_written(
    content: str, message: str, run: Run, text: Path, tmp_path: Path
) -> None:
    ended = run("eval", "--config", write_yaml(tmp_path, content), "--dataset", text)
    assert message in ended.error


def test_an_adapter_of_a_yaml_file_gives_way_to_the_command_line(run: Run, tmp_path: Path) -> None:
    path = write_yaml(tmp_path, "adapter: ./from-yaml\nprompt: the\n")
    for words, name in (
        ([], "from-yaml"),
        (["./argument"], "argument"),
        (["--adapter", "./option"], "option"),
    ):
        assert (
            f"adapter ./{name}: no such folder" in run("generate", "--config", path, *words).error
        )


@pytest.mark.parametrize("recorded", ["./runs/base", "runs/base"], ids=["path", "like a Hub id"])
@pytest.mark.parametrize(
    "command",
    [
        ["eval", "--dataset", "x"],
        ["generate", "--prompt", "the"],
        ["bench"],
        ["report", "--dataset", "x"],
    ],
)
def test_a_recorded_base_that_is_not_here_asks_for_model(
    command: list[str], recorded: str, run: Run, adapter: Path
) -> None:
    change_config(base_model_name_or_path=recorded)(adapter)
    ended = run(*command, adapter)
    assert ended.code == (errors.USAGE if recorded.startswith(".") else errors.HUB)
    assert ended.error.startswith(f"model {recorded}: ")
    assert ended.error.endswith(
        f"; adapter {adapter} names this base: where it is elsewhere by now, pass --model"
    )
    assert "pass --model" not in run(*command, adapter, "--model", "./absent").error


def test_a_message_of_several_lines_is_shown_whole() -> None:
    said = (
        "Error(s) in loading state_dict:\n\tsize mismatch for a.weight\n\tsize mismatch for "
        "b.weight"
    )
    whole = "Error(s) in loading state_dict: size mismatch for a.weight size mismatch for b.weight"
    assert errors.describe(RuntimeError(said)) == (
        errors.OTHER, f"RuntimeError: {whole} (run again with --debug for the traceback)"
    )  # fmt: skip
    with (
        pytest.raises(errors.CliError, match=re.escape(f"model x: cannot be loaded: {whole}")),
        explained("model x", "x"),
    ):
        raise ValueError(said)


def test_a_missing_adapter_folder_is_a_usage_error(run: Run) -> None:
    ended = run("generate", "--adapter", "./absent", "--prompt", "the")
    assert ended.code == errors.USAGE
    assert "adapter ./absent: no such folder" in ended.error


# The Hub: exit code 3


def test_offline_says_so_for_models_datasets_and_adapters(
    run: Run, train_arguments: list[object]
) -> None:
    for ended in (
        run(*train_arguments, "--model", "someone/model"),
        run(*train_arguments, "--dataset", "someone/dataset"),
        run("generate", "--adapter", "someone/adapter", "--prompt", "the"),
    ):
        assert ended.code == errors.HUB
        assert re.match(r"(model|dataset|adapter) someone/\1: .*HF_HUB_OFFLINE is set", ended.error)


HUB_SCRIPT = """
import contextlib, io, json, os, sys
from hf_depthroute.cli import main
base, text, out, cases, tokens = sys.argv[1:]
train = ["train", "--steps", "1", "--length", "16", "--out", out]
answers = []
for label, name in json.loads(cases):
    os.environ.pop("HF_TOKEN", None)
    if label in json.loads(tokens):
        os.environ["HF_TOKEN"] = json.loads(tokens)[label]
    for kind, command in {
        "model": [*train, "--dataset", text, "--model", "someone/" + name],
        "dataset": [*train, "--model", base, "--dataset", "someone/" + name],
        "adapter": ["generate", "--prompt", "the", "--adapter", "someone/" + name],
        "debug": ["generate", "--prompt", "the", "--adapter", "someone/" + name, "--debug"],
    }.items():
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            try:
                main(command)
            except SystemExit as ended:
                answers.append([label, name, kind, ended.code, stderr.getvalue()])
print(json.dumps(answers))
"""

# To somebody without a token the Hub does not tell what is private from what does not exist.
HUB_MESSAGES = {
    ("token", "absent"): "neither a local path nor on the Hub",
    ("token", "private"): "neither a local path nor on the Hub",
    ("token", "gated"): "accept its terms",
    ("wrong token", "private"): "refused the token",
    ("none", "absent"): "no token",
    ("none", "private"): "no token",
    ("none", "gated"): "accept its terms",
}


def test_the_hubs_refusals_have_their_own_messages_and_show_no_token(
    base: Path, text: Path, tmp_path: Path
) -> None:
    """In a process of its own: the Hub client reads its address when it is imported."""
    tokens = {"token": TOKEN, "wrong token": TOKEN.replace("abc", "xyz")}
    with HubServer() as hub:
        for kind in ("", "datasets/"):
            hub.repositories[f"{kind}someone/private"] = Repository(private=True)
            hub.repositories[f"{kind}someone/gated"] = Repository(gated=True)
        cases = (json.dumps(list(HUB_MESSAGES)), json.dumps(tokens))
        ended = subprocess.run(
            [sys.executable, "-c", HUB_SCRIPT, base, text, tmp_path / "out", *cases],
            env=hub.environment(tmp_path / "home", token=None),
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not any(token in ended.stdout for token in tokens.values())
    answers = json.loads(ended.stdout)
    assert len(answers) == 4 * len(HUB_MESSAGES)
    for label, name, kind, code, err in answers:
        lines = err.splitlines()
        assert code == errors.HUB, err
        assert len(lines) == 1 or kind == "debug"
        assert lines[-1].startswith(
            f"error: {'adapter' if kind == 'debug' else kind} someone/{name}: "
        )
        assert HUB_MESSAGES[label, name] in lines[-1]
    assert not (tmp_path / "out").exists()


# Help, debug, exit codes of a real process


@pytest.mark.parametrize("command", ["train", "eval", "bench", "generate"])
def test_help_has_an_example_and_every_command_takes_yaml(command: str, run: Run) -> None:
    ended = run(command, "--help")
    assert ended.code == 0
    assert re.search(rf"Examples?:\n +hf-depthroute {command} (routed|--)", ended.out)
    assert "--config FILE" in ended.out
    assert "--debug" in ended.out


def test_no_arguments_print_the_help(run: Run) -> None:
    ended = run()
    assert ended.code == 0
    assert all(command in ended.out for command in ("train", "eval", "bench", "generate"))


def test_debug_shows_the_traceback_above_the_line(run: Run, train_arguments: list[object]) -> None:
    ended = run(*train_arguments, "--column", "body", "--debug")
    assert ended.code == errors.USAGE
    assert "Traceback (most recent call last)" in ended.err
    assert ended.err.splitlines()[-1].startswith("error: dataset")


def test_the_version_is_shown_with_those_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert out.startswith(f"hf-depthroute {__version__} (torch {version('torch')}, transformers ")


def test_a_process_ends_with_the_code_and_one_line(
    train_arguments: list[object], tmp_path: Path
) -> None:
    truncated = tmp_path / "adapter"
    routed(build_base("llama")).save_pretrained(truncated)
    truncate(truncated)
    processes = {
        errors.HUB: started(*train_arguments, "--model", "someone/model"),
        errors.ADAPTER: started(
            "generate", "--adapter", truncated, "--model", train_arguments[2], *PROMPT
        ),
    }
    for code, process in processes.items():
        out, err = process.communicate(timeout=400)
        assert (process.returncode, out) == (code, "")
        assert re.fullmatch(r"error: [^\n]+\n", err)
