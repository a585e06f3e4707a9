"""The server of `hf-depthroute serve`: what it refuses, what it bounds,
and what it stops computing."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCABULARY, randomised, routed
from text_models import save_base, word_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.import_utils import is_serve_available

from hf_depthroute.cli.serve import link_model
from hf_depthroute.cli.serve_generation import check_generation, check_shared, limited_managers
from hf_depthroute.cli.serve_settings import Limits, is_sampled, wrong_settings

POSITIONS = 1 << 17
OPTIONS = ["--max-prompt-tokens", "64", "--max-output-tokens", "100000", "--max-requests", "20"]
needs_serve = pytest.mark.skipif(
    not is_serve_available(), reason='needs pip install "transformers[serving]"'
)


def save_adapter(folder: Path) -> Path:
    """An adapter on a base with room for answers that take minutes, and no end of its own."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, eos_token_id=None, **sizes
    )
    base = randomised(LlamaForCausalLM(config), "sdpa", torch.float32, 0)
    base.generation_config.eos_token_id = None
    base.save_pretrained(folder / "base")
    word_tokenizer().save_pretrained(folder / "base")
    routed(AutoModelForCausalLM.from_pretrained(folder / "base")).save_pretrained(
        folder / "adapter"
    )
    return folder / "adapter"


class Server:
    """A running server; `post` returns the status and the answer."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    def post(
        self, path: str, body: Any, seconds: float = 60.0, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(*self.address, timeout=seconds)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request("POST", path, raw, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            said = answer.read()
        return answer.status, json.loads(said) if said.startswith(b"{") else {"text": said.decode()}

    def leave(self, path: str, body: Any, seconds: float = 0.3) -> None:
        """Send a request and hang up."""
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
            f"{len(raw)}\r\n\r\n"
        )
        with socket.create_connection(self.address, timeout=10) as connection:
            connection.sendall(head.encode() + raw)
            time.sleep(seconds)


@contextlib.contextmanager
def running(folder: Path, options: list[str]) -> Iterator[tuple[subprocess.Popen[str], Server]]:
    """A server's process, with `folder` for its adapter and its temporary files."""
    adapter = save_adapter(folder)
    command = [
        sys.executable,
        "-m",
        "hf_depthroute",
        "serve",
        str(adapter),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [*command, *OPTIONS, *options], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    try:
        seen = ""
        while "running on" not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        # A full pipe would stop it.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        host, port = seen.split("http://")[1].split()[0].rsplit(":", 1)
        yield process, Server((host, int(port)))
    finally:
        process.kill()
        process.wait()


@pytest.fixture(
    scope="module",
    params=[[], ["--continuous-batching", "--cb-num-blocks", "64"]],
    ids=["plain", "batched"],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("served"), request.param) as (_, served):
        yield served


SHORT: dict[str, Any] = {"prompt": "the cat sat", "max_tokens": 3, "temperature": 0.0}
WRONG: dict[str, tuple[str, Any, int]] = {
    "negative": ("/v1/completions", SHORT | {"max_tokens": -1}, 400),
    "zero": ("/v1/completions", SHORT | {"max_tokens": 0}, 400),
    "a word": ("/v1/completions", SHORT | {"max_tokens": "many"}, 400),
    "too many": ("/v1/completions", SHORT | {"max_tokens": 100_001}, 400),
    "chat negative": ("/v1/chat/completions", {"messages": [], "max_completion_tokens": -5}, 400),
    "responses negative": ("/v1/responses", {"input": "the", "max_output_tokens": -5}, 400),
    "surrogate": ("/v1/completions", b'{"prompt": "the \\ud800 cat", "max_tokens": 3}', 400),
    "not text": ("/v1/completions", b'{"prompt": "caf\xe9"}', 400),
    "not JSON": ("/v1/completions", b"{", 400),
    "deep": ("/v1/completions", b"[" * 60_000, 400),
    "a list": ("/v1/completions", [], 400),
    "long prompt": ("/v1/completions", SHORT | {"prompt": "the " * 200}, 400),
    "large body": ("/v1/completions", SHORT | {"prompt": "the " * 500_000}, 413),
    "no prompt": ("/v1/completions", {"prompt": "", "max_tokens": 3}, 400),
    "no template": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "the"}], "max_tokens": 3},
        400,
    ),
    "no role": ("/v1/chat/completions", {"messages": [{"content": "the"}], "max_tokens": 3}, 400),
    "beams": (
        "/v1/completions",
        SHORT | {"generation_config": json.dumps({"num_beams": 1000})},
        400,
    ),
    "no beam": (
        "/v1/completions",
        SHORT | {"generation_config": json.dumps({"num_beams": 0})},
        400,
    ),
    "cache": (
        "/v1/completions",
        SHORT | {"generation_config": json.dumps({"cache_implementation": "quantized"})},
        400,
    ),
    "end": (
        "/v1/completions",
        SHORT | {"generation_config": json.dumps({"forced_eos_token_id": 999_999})},
        400,
    ),
    "long stop": ("/v1/completions", SHORT | {"stop": "ab" * 10_000}, 400),
    "NaN": ("/v1/completions", b'{"prompt": "the", "max_tokens": 3, "temperature": NaN}', 400),
    "Infinity": ("/v1/completions", b'{"prompt": "the", "max_tokens": 3, "user": -Infinity}', 400),
    "infinite": ("/v1/completions", b'{"prompt": "the", "max_tokens": 3, "top_p": 1e999}', 400),
    "cold": ("/v1/completions", SHORT | {"temperature": -1}, 400),
    "seed": ("/v1/completions", SHORT | {"seed": 2**64}, 400),
    "two answers": ("/v1/completions", SHORT | {"n": 2}, 400),
    "logprobs": ("/v1/completions", SHORT | {"logprobs": 1}, 400),
    "presence": ("/v1/completions", SHORT | {"presence_penalty": 0.5}, 400),
    "a bias where there is none": ("/v1/completions", SHORT | {"logit_bias": {"3": 1}}, 400),
    "JSON mode": (
        "/v1/chat/completions",
        {"messages": [], "response_format": {"type": "json_object"}},
        400,
    ),
    "own template": (
        "/v1/chat/completions",
        {"messages": [], "chat_template_kwargs": {"chat_template": "x"}},
        400,
    ),
    "long chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "the " * 1200}]},
        400,
    ),
    "other model": ("/v1/completions", SHORT | {"model": "gpt2"}, 400),
    "load another": ("/load_model", {"model": "gpt2"}, 400),
    "load none": ("/load_model", {}, 400),
    "reset": ("/reset", {}, 404),
    "transcribe": ("/v1/audio/transcriptions", {"model": "other/model"}, 404),
}


@needs_serve
@pytest.mark.parametrize("case", WRONG)
def test_what_a_client_gets_wrong_is_its_error(case: str, server: Server) -> None:
    path, body, expected = WRONG[case]
    status, said = server.post(path, body)
    assert status == expected, said
    assert len(json.dumps(said)) < 1000


@pytest.mark.parametrize(
    "body, said",
    [
        ({}, None),
        ({"stop": "x" * 256, "generation_config": None}, None),
        ({"stop": ["x"] * 16}, None),
        ({"stop": "x" * 257}, "stop.0='xxxx"),
        ({"stop": ["x"] * 17}, "at most 16 items"),
        ({"stop": ["x", 5]}, "stop.1='5': Input should be a valid string"),
        ({"stop": {}}, "stop='{}': Input should be a valid list"),
        ({"stop": ""}, "stop.0='': String should have at least 1 character"),
        (
            {"generation_config": '{"stop_strings": ["' + "x" * 257 + '"]}'},
            "generation_config.stop_strings.0=",
        ),
        ({"generation_config": "{"}, "generation_config='{': Invalid JSON"),
        ({"generation_config": {"top_k": 1}}, "JSON input should be string"),
        ({"generation_config": "[1]"}, "Input should be a"),
        (
            {
                "generation_config": (
                    '{"do_sample": true, "temperature": 0.5, "top_k": 4, "max_new_tokens": 3}'
                )
            },
            None,
        ),
        ({"generation_config": '{"num_beams": 1, "top_p": null}'}, None),
        (
            {
                "generation_config": GenerationConfig(
                    do_sample=True, max_new_tokens=8
                ).to_json_string()
            },
            None,
        ),
        ({"temperature": True}, "temperature='True': Input should be a valid number"),
        ({"max_tokens": 9}, "max_tokens='9': must be a whole number from 1 to 8"),
        (
            {
                "chat_template_kwargs": {"thinking": False, "tone": "calm"},
                "n": 1,
                "logprobs": False,
            },
            None,
        ),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "'chat_template' is the server's"),
        (
            {"chat_template_kwargs": {"x": [1]}},
            "'x' must be true, false, a number or a short string",
        ),
        ({"response_format": {"type": "text"}, "echo": False, "presence_penalty": 0.0}, None),
        ({"response_format": {"type": "json_object"}}, "Input should be 'text'"),
        (
            {"generation_config": '{"num_beams": 0}'},
            "generation_config.num_beams='0': Input should be 1",
        ),
        (
            {"generation_config": '{"cache_implementation": "quantized"}'},
            "'quantized': Extra inputs are not permitted",
        ),
        (
            {"generation_config": '{"do_sample": "a"}'},
            "do_sample='a': Input should be a valid boolean",
        ),
        (
            {"generation_config": '{"temperature": NaN}'},
            "temperature='nan': Input should be a finite",
        ),
        (
            {"generation_config": '{"temperature": 101}'},
            "temperature='101': Input should be less than or equal to 100",
        ),
        (
            {"generation_config": '{"max_new_tokens": 1000000000}'},
            "max_new_tokens='1000000000': must be a whole",
        ),
    ],
)
def test_a_request_sets_only_what_is_known_to_be_bounded(
    body: dict[str, Any], said: str | None
) -> None:
    wrong = wrong_settings(body, 8)
    assert wrong == said if said is None else said in str(wrong)


@needs_serve
def test_the_served_model_answers_and_loads(server: Server) -> None:
    status, said = server.post("/v1/completions", SHORT | {"model": "adapter"})
    assert status == 200 and said["usage"]["completion_tokens"] == 3
    assert server.post("/load_model", {"model": "adapter"})[0] == 200
    for harmless in (
        {"n": 1, "echo": False, "presence_penalty": 0.0, "stop": None},
        {"temperature": 0, "seed": 3},
    ):
        status, said = server.post("/v1/completions", SHORT | harmless)
        assert status == 200, said


SETTINGS: dict[str, dict[str, Any]] = {
    "stop": {"stop": ["zz"]},
    "stop_strings": {"generation_config": json.dumps({"stop_strings": ["zz"]})},
    "repetition_penalty": {"generation_config": json.dumps({"repetition_penalty": 1.5})},
    "min_new_tokens": {"generation_config": json.dumps({"min_new_tokens": 2, "max_new_tokens": 3})},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "do_sample": {
        "temperature": None,
        "generation_config": json.dumps({"do_sample": True, "top_k": 4}),
    },
}


@needs_serve
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_honoured_or_refused_by_its_name(
    name: str, server: Server, request: Any
) -> None:
    status, said = server.post("/v1/completions", SHORT | SETTINGS[name])
    if request.node.callspec.params["server"]:
        assert status == 400 and name in json.dumps(said), said
    elif not name.startswith("stop"):
        # Transformers matches no stop strings with a tokenizer of whole words.
        assert status == 200, said


@pytest.mark.parametrize(
    "body, sampled",
    [
        ({}, False),
        ({"temperature": 0.0, "top_p": 0.5}, False),
        ({"temperature": 0.7}, True),
        ({"top_p": 0.9}, True),
        ({"top_p": 1.0}, False),
        ({"temperature": 1, "generation_config": '{"top_k": 4}'}, True),
        ({"temperature": 1, "generation_config": '{"do_sample": false}'}, False),
    ],
)
def test_a_temperature_above_0_asks_for_drawn_tokens(body: dict[str, Any], sampled: bool) -> None:
    assert wrong_settings(body, 8) is None
    assert is_sampled(body) == sampled


@needs_serve
def test_tokens_are_drawn_where_the_temperature_is_above_0(server: Server, request: Any) -> None:
    def answer(seed: int) -> tuple[int, Any]:
        return server.post("/v1/completions", SHORT | {"temperature": 9.0, "seed": seed})

    status, said = answer(0)
    if request.node.callspec.params["server"]:
        assert status == 400 and "do_sample" in json.dumps(said), said
        return
    texts = [answer(seed)[1]["choices"][0]["text"] for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) > 1, texts


@pytest.mark.parametrize(
    "wanted, shared, named",
    [
        ({}, {}, None),
        ({"temperature": 0.7}, {}, None),  # nobody samples
        (
            {"do_sample": False, "temperature": 0.0},
            {"do_sample": True, "temperature": 0.7},
            "do_sample",
        ),
        (
            {"do_sample": True, "temperature": 0.2},
            {"do_sample": True, "temperature": 0.7},
            "temperature",
        ),
        ({"do_sample": True, "temperature": 0.7}, {"do_sample": True, "temperature": 0.7}, None),
        ({"do_sample": True, "top_p": 0.9}, {"do_sample": True}, "top_p"),
        ({"do_sample": True, "min_p": 0.1}, {"do_sample": True}, "min_p"),
        ({"repetition_penalty": 1.0, "min_new_tokens": 0}, {}, None),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}, None),
        ({"sequence_bias": {(3,): 1.0}}, {}, "logit_bias"),
    ],
)
def test_continuous_batching_serves_the_models_own_settings(
    wanted: Any, shared: Any, named: str | None
) -> None:
    pytest.importorskip("fastapi")
    if named is None:
        check_shared(GenerationConfig(**wanted), GenerationConfig(**shared))
        return
    with pytest.raises(Exception, match=rf"400: {named}\b.*share the model's own"):
        check_shared(GenerationConfig(**wanted), GenerationConfig(**shared))


@needs_serve
@pytest.mark.nightly(unless=lambda option: not option)
@pytest.mark.parametrize(
    "option", [[], ["--continuous-batching", "--cb-num-blocks", "64"]], ids=["plain", "batched"]
)
def test_sigterm_ends_a_server_with_streams_and_leaves_nothing(
    option: list[str], tmp_path: Path
) -> None:
    with running(tmp_path, option) as (process, server):
        body = json.dumps(SHORT | {"max_tokens": 100_000, "stream": True}).encode()
        streams = []
        for _ in range(20):
            connection = http.client.HTTPConnection(*server.address, timeout=60)
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            streams.append(connection)
        streams[0].getresponse().read(10)
        process.terminate()
        assert process.wait(timeout=60) == 143  # an answer of 100,000 tokens would take longer
        for connection in streams:
            connection.close()
    assert not list(tmp_path.glob("depthroute*"))


COMPUTES_AT_THE_END = """
import sys, threading, torch
from hf_depthroute.cli.serve_generation import limited_managers
from hf_depthroute.cli.serve_settings import Limits

begun = threading.Event()

def compute():
    begun.set()
    for _ in range(50_000):
        torch.ones(8) + 1

limited_managers(Limits(8, 8, 1))[0]().submit(compute)
begun.wait()
sys.exit(143)
"""


@needs_serve
def test_a_process_that_still_computes_ends_with_its_own_code() -> None:
    """Python ends its threads where they come back to it, and in the middle of C++ that aborts."""
    ended = subprocess.run(
        [sys.executable, "-c", COMPUTES_AT_THE_END], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (143, "")


@needs_serve
def test_clients_that_vanish_are_not_computed_for(server: Server) -> None:
    server.post("/v1/completions", SHORT)  # the model is loaded
    endless = SHORT | {"max_tokens": 100_000}
    with ThreadPoolExecutor(16) as clients:
        list(
            clients.map(
                lambda number: server.leave(
                    "/v1/completions", endless | {"stream": number % 2 == 0}
                ),
                range(16),
            )
        )
    started = time.monotonic()
    status, said = server.post("/v1/completions", SHORT, seconds=30)
    assert status == 200, said
    assert time.monotonic() - started < 20


@needs_serve
def test_an_answer_is_cut_to_the_models_positions() -> None:
    from types import SimpleNamespace

    config = SimpleNamespace(
        max_new_tokens=1024, max_length=20, num_beams=1, num_return_sequences=1
    )
    check_generation({"input_ids": [1] * 60}, config, Limits(64, 512, 1, positions=64))
    assert (config.max_new_tokens, config.max_length) == (4, None)


def app_of(completions: Any, limits: Limits) -> Any:
    """An app of one generating route, within limits."""
    from fastapi import FastAPI
    from starlette.requests import Request

    from hf_depthroute.cli.serve_limits import limited

    async def endpoint(request: Request, body: dict[str, Any]) -> Any:
        return await completions(request, body)

    app = FastAPI()
    app.post("/v1/completions", response_model=None)(endpoint)
    return limited(app, "m", limits)


def ask(app: Any, body: bytes, path: str = "/v1/completions", stay: bool = True) -> Any:
    """The messages that `app` answers a request with; its client leaves at once unless it stays."""
    return asyncio.run(asyncio.wait_for(sent_by(app, body, path, stay), 10))


async def sent_by(
    app: Any, body: bytes, path: str = "/v1/completions", stay: bool = True
) -> list[Any]:
    sent: list[Any] = []
    given: asyncio.Queue[Any] = asyncio.Queue()
    given.put_nowait({"type": "http.request", "body": body, "more_body": False})
    if not stay:
        given.put_nowait({"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"x-request-id", b"another's"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await app(scope | {"query_string": b""}, given.get, send)
    return [
        message for message in sent if message.get("status") != 500
    ]  # to whom it does not reach


@needs_serve
def test_a_request_ends_when_its_client_leaves() -> None:
    ended: list[str] = []

    async def endless(request: Any, body: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def left_twice() -> None:
        app = app_of(endless, Limits(8, 8, 1))
        for _ in range(2):  # the place of the first is free again
            await sent_by(app, b"{}", stay=False)
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(left_twice(), 10))
    assert ended == ["cancelled"] * 2


@needs_serve
def test_an_answer_that_a_server_ends_with_is_no_error_of_its_own() -> None:
    """Of every answer that was running, a server that was told to end wrote a traceback."""
    begun: list[Any] = []

    async def endless(request: Any, body: Any) -> None:
        begun.append(body)
        await asyncio.sleep(60)

    async def end() -> None:
        running = asyncio.ensure_future(sent_by(app_of(endless, Limits(8, 8, 1)), b"{}"))
        while not begun:
            await asyncio.sleep(0.01)
        running.cancel()
        await running

    asyncio.run(asyncio.wait_for(end(), 10))


@needs_serve
def test_a_stream_whose_client_left_before_its_first_word_is_not_computed() -> None:
    from types import SimpleNamespace

    class Endless:
        def generate(self, streamer: Any, **rest: Any) -> None:
            while True:
                streamer.put(torch.tensor([1]))
                time.sleep(0.001)

    limits = Limits(8, 8, 1)
    manager = limited_managers(limits)[0]()
    settings = SimpleNamespace(max_new_tokens=8, max_length=None)

    async def streamed(request: Any, body: Any) -> None:
        manager.generate_streaming(
            Endless(), word_tokenizer(), {"input_ids": [1]}, settings, request_id="1"
        )
        await asyncio.sleep(60)

    ask(app_of(streamed, limits), b"{}", stay=False)
    assert manager.submit(lambda: "free").result(timeout=10) == "free"


@needs_serve
def test_more_requests_than_the_limit_get_429_and_no_client_names_its_request() -> None:
    seen: list[Any] = []
    refused: list[Any] = []

    async def asking(request: Any, body: Any) -> dict[str, Any]:
        seen.append((request.state.request_id, body))
        refused.extend(await sent_by(app, b'{"n": 1}'))
        return {}

    app = app_of(asking, Limits(8, 8, 1))
    assert ask(app, b"{}")[0]["status"] == 200
    assert refused[0]["status"] == 429 and (b"retry-after", b"1") in refused[0]["headers"]
    ((name, body),) = seen
    assert name != "another's" and body == {}
    assert ask(app, b"{}")[0]["status"] == 200


@needs_serve
def test_a_body_that_does_not_arrive_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: Any, body: Any) -> dict[str, Any]:
        return {}

    async def slow() -> list[Any]:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        app = app_of(answer, Limits(8, 8, 1))
        await app(scope | {"query_string": b""}, receive, send)
        return sent

    monkeypatch.setattr("hf_depthroute.cli.serve_limits._BODY_SECONDS", 0.1)
    start, body = asyncio.run(asyncio.wait_for(slow(), 10))
    assert start["status"] == 408 and (b"connection", b"close") in start["headers"]
    assert b"did not arrive within 0.1 s" in body["body"]


@needs_serve
def test_a_body_that_no_prompt_within_the_limit_needs_is_not_tokenised() -> None:
    async def answer(request: Any, body: Any) -> dict[str, Any]:
        return {}

    app = app_of(answer, Limits(1024, 8, 1))
    fits = json.dumps({"prompt": "the " * 20_000}).encode()
    assert ask(app, fits)[0]["status"] == 200
    assert ask(app, json.dumps({"prompt": "the " * 35_000}).encode())[0]["status"] == 413


@needs_serve
def test_a_body_that_does_not_arrive_takes_no_place() -> None:
    async def answer(request: Any, body: Any) -> dict[str, Any]:
        return {}

    async def slow() -> int:
        app = app_of(answer, Limits(8, 8, 1))
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])
        reading = asyncio.Event()

        async def receive() -> Any:
            if (part := next(parts, None)) is not None:
                return part
            reading.set()
            return await asyncio.sleep(60)

        async def send(message: Any) -> None:
            raise AssertionError(message)

        waiting = asyncio.ensure_future(app(scope | {"query_string": b""}, receive, send))
        await reading.wait()
        status = (await sent_by(app, b"{}"))[0]["status"]
        waiting.cancel()
        await waiting
        return int(status)

    assert asyncio.run(asyncio.wait_for(slow(), 10)) == 200


@needs_serve
def test_a_stream_has_its_place_and_its_streamer_until_its_last_word() -> None:
    from fastapi.responses import StreamingResponse

    from hf_depthroute.cli.serve_generation import STREAMERS

    class Streamer:
        cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    streamer = Streamer()
    seen: list[Any] = []

    async def streamed(request: Any, body: Any) -> Any:
        STREAMERS.get().append(streamer)

        async def words() -> Any:
            yield "one"
            seen.append(((await sent_by(app, b"{}"))[0]["status"], streamer.cancelled))
            yield "two"

        return StreamingResponse(words())

    app = app_of(streamed, Limits(8, 8, 1))
    assert b"two" in b"".join(message.get("body", b"") for message in ask(app, b"{}"))
    assert seen == [(429, False)] and streamer.cancelled


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "generation_config.json",
        "tokenizer.json",
        "config.json",
        "own.py",
        "chat_template.jinja",
    ],
)
def test_only_the_adapters_own_files_are_served(name: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    routed(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / name).write_text("a stranger's")
    (base / "code.py").write_text("")
    link_model(base, tmp_path / "adapter", tmp_path / "served")
    names = {path.name for path in (tmp_path / "served").iterdir()}
    assert names == {path.name for path in base.iterdir()} - {"code.py"} | {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert all(
        "stranger" not in path.read_text(errors="replace")
        for path in (tmp_path / "served").iterdir()
    )
