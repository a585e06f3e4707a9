"""`hf-depthroute serve`: a routed model behind `transformers serve`.

`transformers serve` does not know this package, and loads no adapter by its name. It does load a folder that holds a
complete model and an adapter, so it is given one: links to the base's files and to the adapter's two. It has no limits
either; `serve_requests` and `serve_engine` add them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..shown import say
from . import options as o
from .adapter import Adapter, OldAdapter, passed_on
from .errors import CliError
from .serve_engine import guarded, limited_engine
from .serve_requests import Limits

_ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]
_BASE_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def serve(
    context: typer.Context,
    adapter: Adapter = "",
    model: o.BaseModel = None,
    adapter_option: OldAdapter = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt; a longer one gets 400.")] = 16_384,
    max_output_tokens: Annotated[int, typer.Option(min=1, help="Longest answer; asking for more gets 400.")] = 4096,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Requests at one time, running and waiting; one more gets 429.")
    ] = 32,
    trust_remote_code: o.TrustRemoteCode = False,
    debug: o.Debug = False,
) -> None:
    """Serve a routed model with `transformers serve`: the API of OpenAI, chat and completions.

    Every other option goes to `transformers serve` (see its --help), such as --port, --device, --dtype and
    --continuous-batching. Requests name the model by the adapter's Hub id or folder name, or not at all. A client that
    leaves ends its request. Needs pip install "transformers[serving]".

    \b
    Example:
      hf-depthroute serve routed --port 8000
      curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "def main():"}'
    """
    from transformers.utils.import_utils import is_serve_available

    from . import loading

    if not is_serve_available():
        raise CliError('serve needs more packages; install them with: pip install "transformers[serving]"')
    loading.quiet(debug)
    base, base_config = loading.find_base(adapter, loading.load_adapter_config(adapter), model)
    positions = getattr(base_config, "max_position_embeddings", None)
    limits = Limits(max_prompt_tokens, max_output_tokens, max_requests, positions)
    name = Path(adapter).resolve().name if Path(adapter).is_dir() else adapter
    from transformers.cli.transformers import app

    with tempfile.TemporaryDirectory(prefix="depthroute") as root:
        patterns = [*_BASE_FILES, "*.py"] if trust_remote_code else _BASE_FILES
        folders = _folder(base, patterns), _folder(adapter, _ADAPTER_FILES)
        link_model(*folders, Path(root, name), code=trust_remote_code)
        say(f"serving {adapter} on {base} as model {name!r}", sys.stderr)
        # The server calls the model by the path that it was given.
        with _working_in(root), limited_engine(limits), _one_model(name, limits):
            trusted = ["--trust-remote-code"] if trust_remote_code else []
            app(["serve", name, *trusted, *passed_on(context)], standalone_mode=False)


@contextlib.contextmanager
def _working_in(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _one_model(name: str, limits: Limits) -> Iterator[None]:
    """Let `transformers serve` list the model that is served, and end on Ctrl-C.

    By itself it lists what lies in the Hub's cache, and its threads of continuous batching outlive it.
    """
    from transformers.cli.serving import server

    owner = name.split("/")[0] if "/" in name else ""
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": owner}
    build: Any = server.build_server
    states = []

    def build_server(model_manager: Any, *handlers: Any, generation_state: Any, **others: Any) -> Any:
        model_manager.get_gen_models = lambda: [model]
        states.append(generation_state)
        served = build(model_manager, *handlers, generation_state=generation_state, **others)
        return guarded(served, name, limits)

    server.build_server = build_server  # type: ignore[assignment]
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):  # its library's word for Ctrl-C
            raise KeyboardInterrupt from error
        raise
    finally:
        server.build_server = build
        for state in states:
            state.shutdown()


def link_model(base: Path, adapter: Path, folder: Path, code: bool = False) -> None:
    """Make `folder`: links to the base's files, with `code` its Python files too, and to the two files of an adapter.

    Weights, settings and tokenizer are the base's, whatever lies beside the adapter.
    """
    folder.mkdir(parents=True)
    files = {file.name: file for file in base.iterdir() if file.is_file() and (code or file.suffix != ".py")}
    for name, file in (files | {name: adapter / name for name in _ADAPTER_FILES}).items():
        (folder / name).symlink_to(file.resolve())


def _folder(source: str, patterns: list[str] | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    import huggingface_hub

    from . import loading

    with loading.explained(f"model {source}", source):
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=patterns))
