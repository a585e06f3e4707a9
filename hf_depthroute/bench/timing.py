"""How figures are measured, and on which machine: interleaved runs and their medians."""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import transformers

from ..base.contexts import synchronise


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The machine and the versions of the measurement."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Wall time of one run, with everything that the device has to do for it."""
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def relative_load() -> float | None:
    """Processes that wanted to run in the last minute, per core; None if it is not known."""
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    except OSError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = {
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            }
    except OSError:
        names = set()
    return ", ".join(sorted(names)) or platform.processor()


Key = TypeVar("Key", bound=Hashable)

WARMUP = 1  # rounds that are not counted; in each the workload also runs untimed


@dataclass(frozen=True)
class Estimate:
    """A median and its standard error, from the quartiles of four rounds or more."""

    value: float
    error: float | None

    @classmethod
    def of(cls, values: list[float]) -> Estimate:
        if len(values) < 4:
            return cls(statistics.median(values), None)
        low, middle, high = statistics.quantiles(values, n=4)
        # 1.349 quartile distances to a standard deviation; a median's error is 1.253 times a
        # mean's.
        return cls(middle, 1.253 * (high - low) / 1.349 / len(values) ** 0.5)

    def rounded(self) -> tuple[float, float | None]:
        """Both to 4 digits."""
        return round(self.value, 4), None if self.error is None else round(self.error, 4)


@dataclass(frozen=True)
class Samples(Generic[Key]):
    """Seconds of each variant, one per round.

    Ratios are taken within a round, where the machine's drift is the same for both sides.
    """

    seconds: Mapping[Key, list[float]]

    def median(self, key: Key) -> float:
        return statistics.median(self.seconds[key])

    def estimate(self, key: Key) -> Estimate:
        return Estimate.of(self.seconds[key])

    def ratio(self, key: Key, reference: Key) -> Estimate:
        """Time of `key` over that of `reference`."""
        return Estimate.of([a / b for a, b in zip(self.seconds[key], self.seconds[reference])])


def interleave(variants: Mapping[Key, Callable[[], float]], rounds: int) -> Samples[Key]:
    """Time all variants in turn, by calls that return seconds; `rounds` count, after `WARMUP`."""
    seconds: dict[Key, list[float]] = {key: [] for key in variants}
    for round_ in range(rounds + WARMUP):
        for key in random.Random(round_).sample(list(variants), len(variants)):
            taken = variants[key]()
            if round_ >= WARMUP:
                seconds[key].append(taken)
    return Samples(seconds)
