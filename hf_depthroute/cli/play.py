"""`hf-depthroute play`: a page where a routed model and its base write side by side."""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import dataclass
from typing import Annotated

import typer

from ..files.shown import say
from . import options as o
from .errors import CliError


@dataclass(kw_only=True)
class PlayOptions:
    adapter: o.Adapter = ""
    model: o.BaseModel = None
    gguf_file: o.GgufFile = None
    phases: o.Phases = None
    chat_template: o.ChatTemplate = True
    host: Annotated[str, "Address to listen on; 0.0.0.0 lets others in."] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860
    dtype: o.Dtype = "auto"
    allow_base_mismatch: o.AllowBaseMismatch = False
    adapter_option: o.OldAdapter = None
    trust_remote_code: o.TrustRemoteCode = False
    debug: o.Debug = False


@o.command
def play(options: PlayOptions) -> None:
    """Open a page to play with: type a prompt, move the budget, and watch which tokens skip layers.

    The routed model and its base write side by side, with tokens per second. Ctrl-C ends it. Needs
    pip install gradio.

    \b
    Example:
      hf-depthroute play routed
    """
    if importlib.util.find_spec("gradio") is None:
        raise CliError("play needs Gradio; install it with: pip install gradio")
    from . import loading

    loading.quiet(options.debug)
    from ..files.out_of_resources import disk_full
    from ..inference.phases import set_phases
    from ..play.page import make_page

    source = loading.find_source(options)
    loading.changed_fields(source.config, None, options.phases)
    tokenizer = source.tokenizer()
    model = source.routed(source.base_model())
    if options.phases is not None:
        set_phases(model, options.phases)
    page = make_page(model, tokenizer, loading.served_name(options.adapter), options.chat_template)
    try:
        _, address, _ = page.launch(
            server_name=options.host, server_port=options.port, prevent_thread_lock=True, ssr_mode=False, quiet=True
        )
    except OSError as error:
        if disk_full(error):  # Gradio keeps files of its pages
            raise
        raise CliError(f"--host {options.host} --port {options.port}: cannot listen there; choose others") from error
    say(f"playing with {options.adapter} on {source.base}: open {address} (Ctrl-C ends it)")
    try:
        threading.Event().wait()
    finally:
        page.close(verbose=False)
