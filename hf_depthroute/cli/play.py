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
from .output import short_name


@dataclass(kw_only=True)
class PlayOptions(o.AdapterOptions):
    phases: o.Phases = None
    chat_template: o.ChatTemplate = True
    host: Annotated[str, "Address to listen on; 0.0.0.0 lets others in."] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535), "Port to listen on."] = 7860


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
    from ..files.out_of_resources import disk_full
    from ..play.page import make_page
    from . import loading

    source = loading.find_source(options)
    tokenizer = source.tokenizer()
    model = source.routed(source.base_model())
    page = make_page(model, tokenizer, short_name(options.adapter), options.chat_template)
    try:
        _, address, _ = page.launch(
            server_name=options.host,
            server_port=options.port,
            prevent_thread_lock=True,
            ssr_mode=False,
            quiet=True,
        )
    except OSError as error:
        if disk_full(error):  # Gradio keeps files of its pages
            raise
        raise CliError(
            f"--host {options.host} --port {options.port}: cannot listen there; choose others"
        ) from error
    say(f"playing with {options.adapter} on {source.base}: open {address} (Ctrl-C ends it)")
    try:
        threading.Event().wait()
    finally:
        page.close(verbose=False)
