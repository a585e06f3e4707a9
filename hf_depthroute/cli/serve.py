"""`hf-depthroute serve`: a routed model behind `transformers serve`.

`transformers serve` does not know this package, and loads no adapter by its name. It does load a folder that holds a
complete model and an adapter, so it is given one: links to the base's files and to the adapter's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ..shown import say
from . import options as o
from .adapter import Adapter, OldAdapter, passed_on
from .errors import CliError

_BASE_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def serve(
    context: typer.Context,
    adapter: Adapter = "",
    model: o.BaseModel = None,
    adapter_option: OldAdapter = None,
    trust_remote_code: o.TrustRemoteCode = False,
    debug: o.Debug = False,
) -> None:
    """Serve a routed model with `transformers serve`: the API of OpenAI, chat and completions.

    Every other option goes to `transformers serve` (see its --help), such as --port, --device, --dtype and
    --continuous-batching. Requests name the model by the adapter's Hub id or folder name, or not at all. Needs
    pip install "transformers[serving]".

    \b
    Example:
      hf-depthroute serve routed --port 8000
      curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "def main():"}'
    """
    from transformers.utils.import_utils import is_serve_available

    from . import loading

    if not is_serve_available():
        raise CliError('serve needs more packages; install them with: pip install "transformers[serving]"')
    base, _ = loading.find_base(adapter, loading.load_adapter_config(adapter), model)
    name = Path(adapter).resolve().name if Path(adapter).is_dir() else adapter
    from transformers.cli.transformers import app

    with tempfile.TemporaryDirectory(prefix="depthroute") as root:
        link_model(_folder(base, _BASE_FILES), _folder(adapter, None), Path(root, name))
        os.chdir(root)  # the server calls the model by the path that it was given
        say(f"serving {adapter} on {base} as model {name!r}", sys.stderr)
        with _one_model(name):
            trusted = ["--trust-remote-code"] if trust_remote_code else []
            app(["serve", name, *trusted, *passed_on(context)], standalone_mode=False)


@contextlib.contextmanager
def _one_model(name: str) -> Iterator[None]:
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
        return build(model_manager, *handlers, generation_state=generation_state, **others)

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


def link_model(base: Path, adapter: Path, folder: Path) -> None:
    """Make `folder`: links to the base's files and to the adapter's, which count where both have one.

    The model's own configuration and weights are the base's, whatever lies beside the adapter.
    """
    folder.mkdir(parents=True)
    files = {file.name: file for file in base.iterdir() if file.is_file()}
    files |= {
        file.name: file
        for file in adapter.iterdir()
        if file.is_file() and file.name != "config.json" and not file.name.startswith(("model", "README"))
    }
    for name, file in files.items():
        (folder / name).symlink_to(file.resolve())


def _folder(source: str, patterns: list[str] | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    import huggingface_hub

    from . import loading

    with loading.explained(f"model {source}", source):
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=patterns))
