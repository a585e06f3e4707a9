"""`hf-depthroute serve`: a routed model served by `transformers serve`, or by vLLM (`serve_vllm`).

`transformers serve` does not know this package, and loads no adapter by its name. It does load a
folder that holds a complete model and an adapter, so it is given one: links to the base's files and
to the adapter's two. It has no limits either; `serve_limits` adds them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..files.shown import say
from . import options as o
from .errors import CliError
from .output import short_name
from .serve_vllm import ServedAdapter, serve_vllm

if TYPE_CHECKING:
    from .serve_settings import Limits

_GRACE = 5  # seconds that running answers have when the server is told to end
_BASE_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(kw_only=True)
class ServeOptions(ServedAdapter):
    engine: Annotated[str, "What serves: transformers or vllm."] = "transformers"
    max_prompt_tokens: Annotated[o.Count, "Longest prompt; a longer one gets 400."] = 16_384
    max_output_tokens: Annotated[o.Count, "Longest answer; asking for more gets 400."] = 4096
    max_requests: Annotated[
        o.Count, "Requests at one time, running and waiting; one more gets 429."
    ] = 32
    trust_remote_code: o.TrustRemoteCode = False


@o.command
def serve(options: ServeOptions) -> None:
    """Serve a routed model with `transformers serve` or vLLM: the API of OpenAI,
    chat and completions.

    Every other option goes to `transformers serve` (see its --help), such as --port, --device,
    --dtype and --continuous-batching; with --engine vllm, to `vllm serve`. The limits are those of
    the first. Requests name the model by the adapter's Hub id or folder name, or not at all. A
    client that leaves ends its request; Ctrl-C and SIGTERM end the server, and after 5 seconds what
    it still answers. With --continuous-batching all requests share the model's own sampling
    settings, and one that asks for others, or for stop strings, gets 400. Needs pip install
    "transformers[serving]", or vLLM.

    \b
    Example:
      hf-depthroute serve routed --port 8000
      curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "def main():"}'
    """  # noqa: E501
    if options.engine == "vllm":
        serve_vllm(options)
        return
    if options.engine != "transformers":
        raise CliError(f"--engine {options.engine}: use one of: transformers, vllm")
    if options.request_budgets:
        raise CliError(
            "--request-budgets goes with --engine vllm; transformers serve hands on no such "
            "parameter"
        )
    from transformers.utils.import_utils import is_serve_available

    from . import loading

    if not is_serve_available():
        raise CliError(
            'serve needs more packages; install them with: pip install "transformers[serving]"'
        )
    loading.quiet(options.debug)
    adapter = options.adapter
    trusted = options.trust_remote_code
    config = loading.load_adapter_config(adapter)
    changed = loading.changed_fields(config, options.budget, options.phases)
    base, base_config, gguf_file = loading.find_base(adapter, config, options.model)
    if gguf_file is not None:
        raise CliError(
            f"model {base}: serve reads no GGUF file; save {gguf_file} as safetensors, and pass "
            "--model"
        )
    positions = getattr(base_config, "max_position_embeddings", None)
    name = short_name(adapter)
    from transformers.cli.transformers import app

    from .serve_settings import Limits

    limits = Limits(
        options.max_prompt_tokens, options.max_output_tokens, options.max_requests, positions
    )

    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="depthroute") as root:
        base_folder = loading.folder_of(
            "model", base, [*_BASE_FILES, "*.py"] if trusted else _BASE_FILES
        )
        link_model(
            base_folder,
            loading.folder_of("model", adapter, loading.ADAPTER_FILES),
            Path(root, name),
            code=trusted,
        )
        if changed:
            change_config(Path(root, name, loading.ADAPTER_FILES[0]), **changed)
        say(f"serving {adapter} on {base} as model {name!r}", sys.stderr)
        # The server calls the model by the path that it was given.
        with contextlib.chdir(root), _one_model(name, limits):
            words = ["--trust-remote-code"] if trusted else []
            app(["serve", name, *words, *o.passed_on(options.context)], standalone_mode=False)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Inside the block, SIGTERM ends the process as an exception does: what is to be removed is."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _one_model(name: str, limits: Limits) -> Iterator[None]:
    """Let `transformers serve` list the model that is served, keep to the limits,
    and end on Ctrl-C.

    By itself it lists what lies in the Hub's cache, and its threads of continuous batching outlive
    it.
    """
    import uvicorn
    from transformers.cli.serving import server, utils

    from .serve_generation import limited_managers
    from .serve_limits import limited

    owner = name.split("/")[0] if "/" in name else ""
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": owner}
    build: Any = server.build_server
    managers = utils.GenerateManager, utils.CBGenerateManager
    states = []

    def build_server(
        model_manager: Any, *handlers: Any, generation_state: Any, **others: object
    ) -> Any:
        model_manager.get_gen_models = lambda: [model]
        states.append(generation_state)
        app = build(model_manager, *handlers, generation_state=generation_state, **others)
        return limited(app, name, limits)

    configure: Any = uvicorn.Config
    server.build_server = build_server  # type: ignore[assignment]
    uvicorn.Config = functools.partial(configure, timeout_graceful_shutdown=_GRACE)  # type: ignore[misc,assignment]
    utils.GenerateManager, utils.CBGenerateManager = limited_managers(limits)  # type: ignore[misc,assignment]
    try:
        yield
    except Exception as error:
        # Its library's word for Ctrl-C.
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    finally:
        server.build_server = build
        uvicorn.Config = configure  # type: ignore[misc]
        utils.GenerateManager, utils.CBGenerateManager = managers  # type: ignore[misc]
        for state in states:
            state.shutdown()


def link_model(base: Path, adapter: Path, folder: Path, code: bool = False) -> None:
    """Make `folder`: links to the base's files, with `code` its Python files too,
    and to the two files of an adapter.

    Weights, settings and tokenizer are the base's, even if the adapter's folder holds others.
    """
    from .loading import ADAPTER_FILES

    folder.mkdir(parents=True)
    there = [file for file in base.iterdir() if file.is_file()]
    files = {file.name: file for file in there if code or file.suffix != ".py"}
    for name, file in (files | {name: adapter / name for name in ADAPTER_FILES}).items():
        (folder / name).symlink_to(file.resolve())


def change_config(file: Path, **fields: Any) -> None:
    """Put a changed copy in the place of `file`, a link to an adapter's configuration."""
    content = json.loads(file.read_text(encoding="utf-8")) | fields
    file.unlink()
    file.write_text(json.dumps(content), encoding="utf-8")
