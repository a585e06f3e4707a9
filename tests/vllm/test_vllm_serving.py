"""Inside vLLM an adapter's tokens are those of `generate`: an engine runs in a process of its own,
and is compared.

Everything is float32 and greedy. Needs vLLM, whose pins differ from this project's: `make vllm`
runs these tests in an environment of their own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_consequential, randomised
from peft import LoraConfig, PeftModel, get_peft_model
from places import HELPERS, ROOT
from ports import free_port
from transformers import AutoConfig, AutoModelForCausalLM

from hf_depthroute import DepthRouteConfig, calibrate, fit_router, get_depth_routed_model
from hf_depthroute.routing.stack import routings_of

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: run `make vllm`", allow_module_level=True)

EMBEDDED = ROOT / "recipes" / "embedded_base" / "model"
STORIES = ROOT.parent / "shared" / "data" / "stories260k"
LENGTHS = (3, 5, 8, 13, 21, 34, 47, 55, 89, 120, 144, 233, 300)
NEW_TOKENS = 40
WORKER = str(HELPERS / "vllm_worker.py")
SLOW = 900  # seconds for one engine, compilation included, on a busy machine

Answer = dict[str, Any]


def prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS
    ]


@torch.no_grad()
def generated(model: Any, given: list[list[int]]) -> list[list[int]]:
    """What `generate` continues each prompt with, one after the other."""
    how = {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }
    outputs = [
        model.generate(input_ids=torch.tensor([prompt]), eos_token_id=None, **how)
        for prompt in given
    ]
    return [output[0, len(prompt) :].tolist() for output, prompt in zip(outputs, given)]


def run_worker(
    folder: Path, engines: list[dict[str, Any]], **environment: str
) -> subprocess.CompletedProcess[str]:
    """`vllm_worker.py` in a process of its own, whose answer is `answer.json`."""
    worker = [sys.executable, WORKER, *written(folder, engines)]
    how: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "cwd": folder,
        "env": os.environ | environment,
    }
    return subprocess.run(worker, timeout=SLOW * len(engines), **how)


def written(folder: Path, engines: list[dict[str, Any]]) -> tuple[str, str]:
    """The paths of a request and of its answer to be."""
    request, answer = folder / "request.json", folder / "answer.json"
    answer.unlink(missing_ok=True)
    request.write_text(json.dumps(engines))
    return str(request), str(answer)


class Worker:
    """`vllm_worker.py` in a process that answers one request after another."""

    def __init__(self, folder: Path) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, WORKER],
            stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=folder,
        )  # fmt: skip

    def answer(self, folder: Path, engines: list[dict[str, Any]]) -> None:
        """Have `answer.json` written; the process's last lines where it fails."""
        assert self.process.stdin is not None and self.process.stdout is not None
        paths = written(folder, engines)
        self.process.stdin.write(json.dumps(paths) + "\n")
        self.process.stdin.flush()
        late = threading.Timer(SLOW * len(engines), self.process.kill)
        late.start()
        said = [""]
        try:
            while said[-1].rstrip() != paths[1]:
                said.append(self.process.stdout.readline())
                assert said[-1], "".join(said[-40:])  # it has ended
        finally:
            late.cancel()


WORKERS: list[Worker] = []  # the one that is running


@pytest.fixture(scope="module", autouse=True)
def workers_end() -> Iterator[None]:
    yield
    for worker in WORKERS:
        worker.process.kill()
        worker.process.wait()


def serve(folder: Path, engines: list[dict[str, Any]]) -> list[Answer]:
    """The answers of `vllm_worker.py`; its last lines where it fails.

    Engines that compile or start processes get one of their own.
    """
    if any(
        not e["options"]["enforce_eager"] or "tensor_parallel_size" in e["options"] for e in engines
    ):
        ended = run_worker(folder, engines)
        assert ended.returncode == 0, "\n".join((ended.stdout + ended.stderr).splitlines()[-40:])
    else:
        if not WORKERS or WORKERS[-1].process.poll() is not None:
            WORKERS.append(Worker(folder))
        WORKERS[-1].answer(folder, engines)
    found: list[Answer] = json.loads((folder / "answer.json").read_text())
    return found


class Case:
    """A base, an adapter, and what `generate` says with and without it."""

    def __init__(
        self, folder: Path, base: Path, model: PeftModel, given: list[list[int]] | None = None
    ) -> None:
        self.folder, self.base, self.adapter = folder, base, folder / "adapter"
        model.save_pretrained(self.adapter)
        self.prompts = given or prompts(model.config.vocab_size)
        self.expected = generated(model, self.prompts)
        with model.disable_adapter():
            self.dense = generated(model, self.prompts)

    def engine(self, passes: list[Any], options: dict[str, Any], **settings: Any) -> dict[str, Any]:
        adapter = {"adapter": str(self.adapter), **settings}
        fields = {
            "model": str(self.base),
            "adapter": adapter,
            "passes": passes,
            "new_tokens": NEW_TOKENS,
        }
        return {**fields, "options": {"enforce_eager": True} | options}

    @property
    def together(self) -> list[list[list[int]]]:
        """One call of all prompts."""
        return [self.prompts]

    @property
    def alone(self) -> list[list[list[int]]]:
        """A call for each prompt."""
        return [[prompt] for prompt in self.prompts]

    def check(self, answer: Answer) -> None:
        """Every pass has the routed model's tokens, which are not the base's."""
        assert self.expected != self.dense
        for calls in answer["tokens"]:
            assert [tokens for call in calls for tokens in call] == self.expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The Llama that comes with the demo, and a router that was calibrated on random text."""
    return calibrated_llama(tmp_path_factory.mktemp("llama"))


def calibrated_llama(folder: Path, given: slice = slice(None), **fields: Any) -> Case:
    model = get_depth_routed_model(
        AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32),
        DepthRouteConfig(layers=[1, 2, 4, 5], **fields),
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".depth_route_branch." in name and ".down." in name:  # a new branch adds nothing
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    text = torch.randint(3, model.config.vocab_size, (8, 128), generator=generator)
    calibrate(model, [{"input_ids": text}])
    return Case(folder, EMBEDDED, model, prompts(model.config.vocab_size)[given])


@pytest.fixture(scope="module")
def eager(llama: Case) -> Answer:
    passes = [llama.together, llama.alone]
    (answer,) = serve(llama.folder, [llama.engine(passes, {"enable_prefix_caching": False})])
    return answer


def test_prompts_together_and_alone_continue_as_generate_does(llama: Case, eager: Answer) -> None:
    llama.check(eager)
    assert eager["cached"] == 0


def test_the_rows_that_enter_an_mlp_are_those_that_were_chosen(llama: Case, eager: Answer) -> None:
    (entered,), (counted,) = eager["entered"], eager["counted"]
    given = 2 * sum(len(prompt) + NEW_TOKENS - 1 for prompt in llama.prompts)
    assert entered.keys() == counted.keys() == {"1", "2", "4", "5"}
    for index, (full, rows) in counted.items():
        assert rows == given
        assert 0.2 * rows < full < 0.8 * rows
        assert entered[index] == full


def test_no_row_enters_the_mlp_of_a_static_layer(tmp_path: Path) -> None:
    case = calibrated_llama(tmp_path, static_layers=[2])
    (answer,) = serve(
        case.folder, [case.engine([case.together, case.alone], {"enable_prefix_caching": False})]
    )
    case.check(answer)
    (entered,), (counted,) = answer["entered"], answer["counted"]
    assert entered.get("2", 0) == counted["2"][0] == 0 < counted["2"][1]


def test_chunked_prompts_and_cached_prefixes_change_nothing(llama: Case) -> None:
    options = {"max_num_batched_tokens": 64, "enable_prefix_caching": True}
    (answer,) = serve(
        llama.folder, [llama.engine([llama.together, llama.together, llama.alone], options)]
    )
    llama.check(answer)
    assert answer["cached"] > 500


def test_a_compiled_engine_skips_the_same_rows(llama: Case, eager: Answer) -> None:
    options = {"enforce_eager": False, "enable_prefix_caching": False}
    (answer,) = serve(llama.folder, [llama.engine([llama.together, llama.alone], options)])
    llama.check(answer)
    assert (answer["entered"], answer["counted"]) == (eager["entered"], eager["counted"])


def test_two_tensor_parallel_processes_decide_alike(llama: Case, eager: Answer) -> None:
    options = {"tensor_parallel_size": 2, "enable_prefix_caching": False}
    (answer,) = serve(llama.folder, [llama.engine([llama.together, llama.alone], options)])
    llama.check(answer)
    assert answer["entered"] == eager["entered"] * 2
    assert answer["counted"] == [*eager["counted"], {}]


def test_another_budget_is_that_of_set_budget(llama: Case) -> None:
    from hf_depthroute import set_budget

    base = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(llama.adapter)).eval()
    set_budget(model, 0.25)
    expected = generated(model, llama.prompts)
    assert expected not in (llama.expected, llama.dense)
    engines = [llama.engine([llama.together], {}, budget=budget) for budget in (0.25, 1.0)]
    quarter, whole = serve(llama.folder, engines)
    assert quarter["tokens"] == [[expected]]
    assert whole["tokens"] == [[llama.dense]]


def test_prompts_alone_are_routed_where_phases_say_so(llama: Case) -> None:
    """Generated tokens and the last one of a prompt run in full:
    the rows that are chosen are prompts' only."""
    from hf_depthroute import set_phases

    base = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(llama.adapter)).eval()
    set_phases(model, "prefill")
    expected = generated(model, llama.prompts)
    assert expected not in (llama.expected, llama.dense)
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    (answer,) = serve(
        llama.folder, [llama.engine([llama.together, llama.alone], options, phases="prefill")]
    )
    for calls in answer["tokens"]:
        assert [tokens for call in calls for tokens in call] == expected
    (entered,), (counted,) = answer["entered"], answer["counted"]
    generated_rows = 2 * len(llama.prompts) * NEW_TOKENS  # with the last one of each prompt
    for index, (full, rows) in counted.items():
        assert (
            generated_rows < full == entered[index] < generated_rows + 0.8 * (rows - generated_rows)
        )


def fitted_for_prompts(base: Any, folder: Path, place: Path, **fields: Any) -> Case:
    """An adapter as a fit for prompts leaves it, layers differing;
    branches and neurons are drawn at random."""
    config = DepthRouteConfig(
        layers=[1, 2, 3], target="block", gate="sinks", budget=0.001, branch="lowrank",
        branch_rank=8, phases="prefill", prompt_tail=4, target_pattern={2: "attention"},
        branch_pattern={3: "neurons"}, rank_pattern={3: 24}, **fields,
    )  # fmt: skip
    model = get_depth_routed_model(base, config).eval()
    generator = torch.Generator().manual_seed(0)
    for routing in routings_of(model):
        branch: Any = routing.depth_route_branch["default"]
        branch.down.weight.data.copy_(
            0.05 * torch.randn(branch.down.weight.shape, generator=generator)
        )
        if routing.layer_index == 3:
            branch.choose(torch.rand(routing.ffn_width, generator=generator))
    return Case(folder, place, model)


@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": False}, {"tensor_parallel_size": 2}],
    ids=["eager", "compiled", "two processes"],
)
def test_a_fit_for_prompts_is_served_as_generate_has_it(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Attention is computed for every row; the rows that enter a routed FFN are those that run it.

    Layer 2 skips its attention alone: its FFN is none of the operator's, and a compiler takes its
    hook away.
    """
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    case = fitted_for_prompts(base, tmp_path, EMBEDDED)
    given = {"enable_prefix_caching": False, "max_num_batched_tokens": 2048} | options
    (answer,) = serve(tmp_path, [case.engine([case.together, case.alone], given)])
    case.check(answer)
    rows = 2 * sum(len(prompt) + NEW_TOKENS - 1 for prompt in case.prompts)
    in_full = 2 * sum(min(len(prompt), 4) + NEW_TOKENS - 1 for prompt in case.prompts)
    counted = answer["counted"][0]
    assert {index: tuple(found) for index, found in counted.items()} == dict.fromkeys(
        "123", (in_full, rows)
    )
    for entered in answer["entered"]:
        assert entered["1"] == entered["3"] == in_full


FLEXIDEPTH = {
    "gate": "bottleneck",
    "branch": "swiglu",
    "selection": "threshold",
    "threshold": "budget",
}


@pytest.mark.parametrize(
    "fields",
    [{}, {"scale_by_gate": True}, FLEXIDEPTH, {"gate": "halting", "threshold": "budget"}],
    ids=["hard", "scaled", "flexidepth", "halting"],
)
def test_whole_blocks_are_served(fields: dict[str, Any], tmp_path: Path) -> None:
    case = calibrated_llama(tmp_path, target="block", **fields)
    (answer,) = serve(
        tmp_path, [case.engine([case.together, case.alone], {"enable_prefix_caching": False})]
    )
    case.check(answer)
    (entered,), (counted,) = answer["entered"], answer["counted"]
    assert entered == {index: full for index, (full, _) in counted.items()}
    assert all(0.2 * rows < full < 0.8 * rows for full, rows in counted.values())


Budgets = tuple[float | None, ...]
OWN: Budgets = (0.25, None, 1.0, 0.75)  # of requests, in turn; None: the server's


def expected_at(case: Case, phases: str, server: float | None = None) -> list[list[int]]:
    """What `generate` continues each prompt with, at the budget that it asks for."""
    from hf_depthroute import set_budget, set_phases, use_budget

    base = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(case.adapter)).eval()
    set_phases(model, phases)
    if server is not None:
        set_budget(model, server)
    found = []
    for index, prompt in enumerate(case.prompts):
        budget = OWN[index % len(OWN)]
        with contextlib.nullcontext() if budget is None else use_budget(model, budget):
            found += generated(model, [prompt])
    return found


@pytest.mark.parametrize(
    "options, settings",
    [
        ({}, {}),
        ({"max_num_batched_tokens": 64}, {"budget": 1.0}),
        ({"max_num_batched_tokens": 2048}, {"phases": "prefill"}),
    ],
    ids=["eager", "chunks, dense server", "prompts only"],
)
def test_requests_of_other_budgets_in_one_batch_are_those_alone(
    llama: Case, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    expected = expected_at(llama, settings.get("phases", "all"), settings.get("budget"))
    engine = llama.engine([llama.together, llama.alone], options, request_budgets=True, **settings)
    engine["budgets"] = [
        (prompt, OWN[index % len(OWN)]) for index, prompt in enumerate(llama.prompts)
    ]
    (answer,) = serve(llama.folder, [engine])
    for calls in answer["tokens"]:
        assert [tokens for call in calls for tokens in call] == expected
    assert expected not in (llama.expected, llama.dense)
    assert answer["cached"] == 0  # a prefix is one budget's
    (entered,), (counted,) = answer["entered"], answer["counted"]
    assert entered == {index: full for index, (full, _) in counted.items()}


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MODULES = {  # that a LoRA changes
    "attention": ATTENTION,
    "ffn": ["gate_proj", "down_proj"],
    "both": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    "embeddings": ["embed_tokens"],
}
LORAS = ("attention", "ffn", "both", "")  # of requests, in turn; the last one has none


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with LoRAs of the embedded base, drawn at random."""
    folder = tmp_path_factory.mktemp("loras")
    generator = torch.Generator().manual_seed(0)
    for name, targets in MODULES.items():
        config = LoraConfig(target_modules=targets, r=4, lora_alpha=8, task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(EMBEDDED), config, name)
        for weights, parameter in model.named_parameters():
            if "lora_" in weights:
                parameter.data.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder)
    return folder


def lora_of(index: int) -> str:
    """The name of the LoRA of a prompt; empty for none."""
    return LORAS[index % len(LORAS)]


def expected_with(case: Case, loras: Path, budgets: Budgets) -> list[list[int]]:
    """What `generate` continues each prompt with, with its LoRA and its budget."""
    from hf_depthroute import use_budget

    found: list[list[int]] = [[]] * len(case.prompts)
    for name in LORAS:
        base: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
        if name:
            base = PeftModel.from_pretrained(base, str(loras / name), name).get_base_model()
        model = PeftModel.from_pretrained(base, str(case.adapter), "router").eval()
        for index, prompt in enumerate(case.prompts):
            if lora_of(index) == name:
                budget = budgets[index % len(budgets)]
                with contextlib.nullcontext() if budget is None else use_budget(model, budget):
                    (found[index],) = generated(model, [prompt])
    return found


def check_loras(
    case: Case, loras: Path, options: dict[str, Any], budgets: Budgets = (None,)
) -> None:
    """Prompts together and alone, with LoRAs, continue as `generate` does."""
    expected = expected_with(case, loras, budgets)
    engine = case.engine(
        [case.together, case.alone],
        {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8} | options,
        request_budgets=len(budgets) > 1 or None,
    )
    engine["loras"] = [
        (prompt, str(loras / lora_of(index)))
        for index, prompt in enumerate(case.prompts)
        if lora_of(index)
    ]
    engine["budgets"] = [
        (prompt, budgets[index % len(budgets)]) for index, prompt in enumerate(case.prompts)
    ]
    (answer,) = serve(case.folder, [engine])
    for calls in answer["tokens"]:
        assert [tokens for call in calls for tokens in call] == expected
    unchanged = [tokens == other for tokens, other in zip(expected, case.expected)]
    assert not any(same for index, same in enumerate(unchanged) if lora_of(index))
    (entered,), (counted,) = answer["entered"], answer["counted"]
    assert entered == {index: full for index, (full, _) in counted.items()}


def test_requests_with_loras_in_one_batch_are_those_alone(llama: Case, loras: Path) -> None:
    check_loras(llama, loras, {"max_num_batched_tokens": 64})


def test_loras_change_a_branch_of_neurons_as_they_change_the_ffn(
    loras: Path, tmp_path: Path
) -> None:
    case = calibrated_llama(tmp_path, slice(3, 11), branch="neurons", branch_rank=24)
    check_loras(case, loras, {}, budgets=(0.25, None, 0.75))


def test_a_server_takes_a_budget_and_a_lora_with_a_request(
    llama: Case, loras: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One LoRA is there from the start, others come at run time."""
    expected = expected_with(llama, loras, OWN)
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    given = ["--enable-lora", "--max-loras", "2", "--lora-modules", f"ffn={loras / 'ffn'}"]
    with server(llama, tmp_path / "log", "--request-budgets", *given) as port:
        for name in ("attention", "both"):
            body = {"lora_name": name, "lora_path": str(loras / name)}
            post(port, body, "/v1/load_lora_adapter")
        with pytest.raises(urllib.error.HTTPError) as refused:
            body = {"lora_name": "embeddings", "lora_path": str(loras / "embeddings")}
            post(port, body, "/v1/load_lora_adapter")
        assert "expected target modules in" in refused.value.read().decode()

        def ask(index: int) -> list[int]:
            budget = OWN[index % len(OWN)]
            return complete(port, llama.prompts[index], budget, lora_of(index) or "adapter")

        with ThreadPoolExecutor(len(llama.prompts)) as clients:
            assert list(clients.map(ask, range(len(llama.prompts)))) == expected
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(port, llama.prompts[0], 1.5)
        assert refused.value.code == 400
        assert "budget=1.5 must be a finite number in (0, 1]" in refused.value.read().decode()
        assert ask(0) == expected[0]


def test_without_the_plugin_vllm_fails_and_serves_nothing(llama: Case) -> None:
    engine = llama.engine([llama.together], {})
    ended = run_worker(llama.folder, [engine], VLLM_PLUGINS="none")
    assert ended.returncode != 0 and not (llama.folder / "answer.json").exists()
    assert "Model architectures ['DepthRoutedForCausalLM'] are not supported" in ended.stderr


def test_what_is_not_exact_is_refused_before_a_process_starts(llama: Case) -> None:
    options = {"enable_lora": True, "fully_sharded_loras": True}
    ended = run_worker(llama.folder, [llama.engine([llama.together], options)])
    assert ended.returncode != 0 and not (llama.folder / "answer.json").exists()
    assert "--fully-sharded-loras is not supported with a depth-routed adapter" in ended.stderr
    assert "EngineCore" not in ended.stderr


def post(port: int, body: dict[str, Any], path: str) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = answer.read().decode()
    return text


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


@contextlib.contextmanager
def server(case: Case, log: Path, *more: str) -> Iterator[int]:
    """The port of a server, which ends on SIGTERM."""
    port = free_port()
    options = [
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--enforce-eager",
        *more,
    ]
    command = [
        sys.executable,
        "-m",
        "hf_depthroute",
        "serve",
        str(case.adapter),
        "--engine",
        "vllm",
        *options,
    ]
    variables = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | variables, cwd=log.parent
        )
    try:
        for _ in range(SLOW):
            with contextlib.suppress(OSError):
                get(port, "/health")
                break
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(1)
        yield port
        process.terminate()
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()


def complete(
    port: int, prompt: list[int], budget: float | None = None, model: str = "adapter"
) -> list[int]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    if budget is not None:
        body["vllm_xargs"] = {"depth_route_budget": budget}
    answer = json.loads(post(port, body | {"return_token_ids": True}, "/v1/completions"))
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def rows_counted(port: int) -> dict[str, float]:
    """Rows of every routed layer, as the Prometheus endpoint has them;
    none before the first count."""
    found = re.findall(
        r'^depthroute:rows_total\{layer="(\d)"\} (\S+)', get(port, "/metrics"), re.MULTILINE
    )
    return {layer: float(rows) for layer, rows in found}


def test_a_server_answers_counts_rows_and_ends_on_sigterm(llama: Case, tmp_path: Path) -> None:
    with server(llama, tmp_path / "log") as port:
        assert [model["id"] for model in json.loads(get(port, "/v1/models"))["data"]] == ["adapter"]
        for _ in range(30):
            assert complete(port, llama.prompts[7]) == llama.expected[7]
            if counted := rows_counted(port):
                break
            time.sleep(1)
        assert sorted(counted) == ["1", "2", "4", "5"]
        assert all(rows > 0 for rows in counted.values())
    assert "Depth routing: " in (tmp_path / "log").read_text()


def test_two_data_parallel_copies_answer_alike(llama: Case, tmp_path: Path) -> None:
    """vLLM shares requests out between them; each says what it ran."""
    with server(llama, tmp_path / "log", "--data-parallel-size", "2") as port:
        with ThreadPoolExecutor(len(llama.prompts)) as clients:
            assert (
                list(clients.map(lambda prompt: complete(port, prompt), llama.prompts))
                == llama.expected
            )
        for _ in range(30):
            with ThreadPoolExecutor(2) as clients:
                assert (
                    list(clients.map(lambda _: complete(port, llama.prompts[7]), range(2)))
                    == [llama.expected[7]] * 2
                )
            copies = set(
                re.findall(r"Worker pid=(\d+).*Depth routing: ", (tmp_path / "log").read_text())
            )
            if len(copies) == 2:
                break
            time.sleep(1)
        assert len(copies) == 2
        assert sorted(rows_counted(port)) == ["1", "2", "4", "5"]


HEAD = 32  # the smallest head of vLLM's attention on a CPU
_SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LAYERS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "layer_types": _LAYERS,
    "sliding_window": 16,
}
_GEMMA["tie_word_embeddings"] = False  # tied and random, it says one word over and over
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gemma2": _GEMMA | {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 1.0},
    "gemma3_text": _GEMMA,
    "gpt_neox": {},
    "phi": {"qk_layernorm": False},
    "cohere": {"logit_scale": 0.5},
}


def random_base(family: str, folder: Path) -> Any:
    sizes = _SIZES | FAMILIES[family]
    if family == "gpt_neox":
        sizes.pop("num_key_value_heads")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    # With sdpa, Gemma 2 leaves its softcap out.
    base = randomised(model, "eager", torch.float32, seed=0)
    base.save_pretrained(folder / "base")
    return base


def random_model(family: str, folder: Path) -> Case:
    routed = get_depth_routed_model(random_base(family, folder), DepthRouteConfig(layers=[1, 2, 3]))
    make_consequential(routed)
    return Case(folder, folder / "base", routed.eval())


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, Answer]]:
    """All in one process, one engine after the other."""
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        (folder / family).mkdir()
    cases = {family: random_model(family, folder / family) for family in FAMILIES}
    answers = serve(folder, [case.engine([case.together], {}) for case in cases.values()])
    return {family: (case, answer) for (family, case), answer in zip(cases.items(), answers)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_continues_as_generate_does(
    family: str, families: dict[str, tuple[Case, Answer]]
) -> None:
    case, answer = families[family]
    case.check(answer)
    (entered,), (counted,) = answer["entered"], answer["counted"]
    assert entered == {index: full for index, (full, _) in counted.items()}


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "cohere"])
def test_a_fit_for_prompts_is_served_in_a_family(family: str, tmp_path: Path) -> None:
    """Norms after a sublayer, attention and FFN side by side, a norm that counts from one."""
    case = fitted_for_prompts(random_base(family, tmp_path), tmp_path, tmp_path / "base")
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    (answer,) = serve(tmp_path, [case.engine([case.together], options)])
    case.check(answer)


def with_wide_heads(model: Any) -> Any:
    """The same function with heads of `HEAD` dimensions: zeros in between,
    and queries scaled against the new size.

    Rotary pairs `(i, i + d / 2)` turn by `theta^(-2i / d)`, so pair `i` moves to where that angle
    is in the wide head.
    """
    config = type(model.config).from_dict(model.config.to_dict() | {"head_dim": HEAD})
    wide = type(model)(config).eval()
    narrow = model.config.head_dim
    step, half = HEAD // narrow, narrow // 2
    place = torch.tensor([step * (i % half) + (HEAD // 2) * (i // half) for i in range(narrow)])
    tensors, held = model.state_dict(), wide.state_dict()
    for name, value in tensors.items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            heads = held[name].zero_().view(-1, HEAD, value.shape[-1])
            heads[:, place] = value.view(-1, narrow, value.shape[-1]) * (
                (HEAD / narrow) ** 0.5 if kind == "q_proj" else 1
            )
        elif kind == "o_proj":
            held[name].zero_().view(value.shape[0], -1, HEAD)[..., place] = value.view(
                value.shape[0], -1, narrow
            )
        else:
            held[name].copy_(value)
    return wide


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs the checkpoint in ../shared/data")
def test_a_pretrained_model_tells_the_story_that_generate_tells(tmp_path: Path) -> None:
    """Fitted on stories; the prompts are beginnings of others."""
    from transformers import AutoTokenizer

    base, tokenizer = (
        AutoModelForCausalLM.from_pretrained(STORIES),
        AutoTokenizer.from_pretrained(STORIES),
    )
    wide = with_wide_heads(base)
    lines = (STORIES.parent / "stories.txt").read_text(encoding="utf-8").splitlines()
    ids = [tokenizer(line)["input_ids"] for line in lines[:80] + lines[-200:]]
    text = torch.tensor([row[:128] for row in ids if len(row) >= 128])
    torch.testing.assert_close(wide(text[:4]).logits, base(text[:4]).logits, rtol=1e-4, atol=1e-4)
    wide.save_pretrained(tmp_path / "base")
    model = fit_router(wide, [{"input_ids": part} for part in text[:64].split(8)], keep=0.6)
    starts = [
        next(row for row in reversed(ids) if len(row) >= length)[:length] for length in LENGTHS
    ]
    case = Case(tmp_path, tmp_path / "base", model, starts)
    (answer,) = serve(tmp_path, [case.engine([case.together, case.alone], {})])
    case.check(answer)
