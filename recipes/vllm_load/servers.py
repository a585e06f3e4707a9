"""Servers of vLLM on this machine, each a process of its own with a port of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

START_SECONDS = 600


class Server:
    """A running server.

    Args:
        words: The module that Python runs, with its arguments; `--port` is added.
        log: Where everything that it prints goes.
        threads: How many compute.
    """

    def __init__(self, words: Sequence[str], log: Path, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.log = log
        variables = {
            "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads),
            "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words, "--port", str(self.port)], stdout=out, stderr=out,
                env=os.environ | variables, start_new_session=True,
            )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def wait(self) -> None:
        """Until it answers."""
        for _ in range(START_SECONDS):
            try:
                self.get("/health")
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server ended; see {self.log}") from None
                time.sleep(1)
            else:
                return
        raise RuntimeError(f"no answer within {START_SECONDS} seconds; see {self.log}")

    def metrics(self, name: str) -> list[float]:
        """The values of a metric of the Prometheus endpoint, one for each of its labels."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(self.get("/metrics"))
        return [
            sample.value for family in families for sample in family.samples if sample.name == name
        ]

    def metric(self, name: str) -> float:
        """Their sum."""
        return sum(self.metrics(name))

    def rows_full(self) -> float | None:
        """Share of the rows of routed layers that ran in full since the start;
        None before the first count."""
        rows = self.metric("depthroute:rows_total")
        return self.metric("depthroute:rows_full_total") / rows if rows else None

    def memory(self) -> float:
        """MiB of its processes that nothing else shares."""
        import psutil

        top = psutil.Process(self.process.pid)
        return sum(p.memory_full_info().uss for p in (top, *top.children(recursive=True))) / 2**20

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def native(base: Path) -> list[str]:
    """The words that serve the base alone, as vLLM would by itself."""
    return ["vllm.entrypoints.openai.api_server", "--model", str(base)]


def dense(base: Path) -> list[str]:
    """The words that serve the base alone, on the backend that routed models have too."""
    return [*native(base), "--model-impl", "transformers"]


def routed(base: Path, adapter: Path, phases: str) -> list[str]:
    own = ["--model", str(base), "--phases", phases]
    return ["hf_depthroute", "serve", str(adapter), "--engine", "vllm", *own]


@contextmanager
def running(
    words: dict[str, list[str]], options: Sequence[str], folder: Path, threads: int
) -> Iterator[dict[str, Server]]:
    """Servers by name, all of them answering; they end with the block."""
    with ExitStack() as stack:
        servers = {}
        for name, own in words.items():
            servers[name] = Server([*own, *options], folder / f"{name}.log", threads)
            stack.callback(servers[name].end)
            servers[name].wait()
        yield servers
