"""Whether a stranger can install this: the pins, resolved from the public package index alone.

    python .ci/resolve.py --uv .venv/bin/uv check
    python .ci/resolve.py --uv .venv/bin/uv write [--upgrade]

uv resolves for Pythons and platforms that are not here. It runs with an empty home and without any
configuration or variable of this machine, so neither local wheels nor another index can hide what
others meet. `check` fails when

* a Python or platform does not resolve, or needs a package without a wheel (three small pure-Python
  ones have none);
* `constraints.txt` is not what `write` would write;
* a build of PyTorch for CPUs would still bring CUDA;
* the pin that once broke every installation (triton 3.6.0 beside torch 2.13.0) passes unnoticed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin")
# What lm-eval needs and publishes as source only; each is Python alone and builds anywhere.
SOURCE_ONLY = ("rouge-score", "sqlitedict", "word2number")
HEADER = """\
# Every version that is installed, for Python 3.11 to 3.14 on Linux and macOS; `make lock` writes this file.
# pyproject.toml holds the lower bounds.
"""  # noqa: E501


def pinned_extras() -> list[str]:
    """The extras whose packages `constraints.txt` pins: all but vLLM's,
    which pins PyTorch and transformers itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [name for name in project["optional-dependencies"] if name != "vllm"]


class ResolveError(Exception):
    """A resolution failed, or one that has to fail did not."""


class Resolver:
    """uv in a clean environment.

    Args:
        uv: The command.
        home: An empty folder; uv keeps its cache in it.
    """

    def __init__(self, uv: str, home: Path) -> None:
        self.uv = uv
        # Certificates: how to reach an index, not which.
        kept = ("PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
        self.environment = {name: os.environ[name] for name in kept if name in os.environ}
        self.environment |= {"HOME": str(home), "MACOSX_DEPLOYMENT_TARGET": "14.0"}

    def compile(self, *arguments: str) -> str:
        """`uv pip compile` of `pyproject.toml`; what it printed.

        Raises:
            ResolveError: If there is no solution; the message is uv's.
        """
        command = [
            self.uv,
            "pip",
            "compile",
            "--no-config",
            "--no-header",
            "--no-annotate",
            "--no-progress",
        ]
        done = subprocess.run(
            [*command, *arguments, "pyproject.toml"],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ResolveError(done.stderr.strip())
        return done.stdout

    def locked(self, constraints: Path, upgrade: bool = False) -> str:
        """The text of `constraints.txt`, for `pinned_extras`,
        keeping the versions that `constraints` holds."""
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "constraints.txt"
            if not upgrade:
                target.write_text(constraints.read_text(encoding="utf-8"), encoding="utf-8")
            group = "pyproject.toml:measured"
            extras = [word for name in pinned_extras() for word in ("--extra", name)]
            universal = ("--universal", "--python-version", PYTHONS[0], *extras, "--group", group)
            self.compile(*universal, "--quiet", "--output-file", str(target))
            return HEADER + target.read_text(encoding="utf-8")


def pins(text: str) -> dict[str, str]:
    """Versions by package in what uv printed."""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", text, flags=re.MULTILINE))


def cpu_wheel(folder: Path, version: str) -> None:
    """Write a wheel that stands for PyTorch's CPU build: its name and version,
    and none of CUDA's packages."""
    release = f"torch-{version}+cpu"
    lines = ("Metadata-Version: 2.1", "Name: torch", f"Version: {version}+cpu")
    with zipfile.ZipFile(folder / f"{release}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{release}.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(
            f"{release}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{release}.dist-info/RECORD", "")


def check(resolver: Resolver, constraints: Path) -> None:
    """Resolve for every Python and platform, then the three further checks of the module's text.

    Raises:
        ResolveError: At the first that fails.
    """
    wheels = [
        "--only-binary",
        ":all:",
        *(word for name in SOURCE_ONLY for word in ("--no-binary", name)),
    ]
    limits = ["--constraints", str(constraints)]

    def resolve(python: str, platform: str, *more: str) -> dict[str, str]:
        target = ("--python-version", python, "--python-platform", platform)
        return pins(resolver.compile(*target, *wheels, *more))

    def line(python: str, platform: str) -> str:
        try:
            found = resolve(python, platform, "--extra", "dev", *limits)
        except ResolveError as error:
            raise ResolveError(
                f"Python {python} on {platform} does not resolve:\n{error}"
            ) from None
        triton = f", triton {found['triton']}" if "triton" in found else ""
        return f"Python {python}, {platform}: {len(found)} packages, torch {found['torch']}{triton}"

    with ThreadPoolExecutor(4) as pool:  # most of the time is waiting for the index
        for text in pool.map(line, *zip(*product(PYTHONS, PLATFORMS))):
            print(text, flush=True)

    if resolver.locked(constraints) != constraints.read_text(encoding="utf-8"):
        raise ResolveError("constraints.txt is not what `make lock` writes; run it")

    with tempfile.TemporaryDirectory() as folder:
        cpu_wheel(Path(folder), pins(constraints.read_text(encoding="utf-8"))["torch"])
        small = resolve(PYTHONS[0], PLATFORMS[0], "--find-links", folder, *limits)
        cuda = [name for name in small if name.startswith(("nvidia", "cuda", "triton"))]
        if cuda or not small["torch"].endswith("+cpu"):
            raise ResolveError(
                f"the CPU build of PyTorch, {small['torch']}, would still bring {cuda}"
            )
        print(f"with PyTorch's CPU build, without extras: {len(small)} packages, none of CUDA")

        broken = Path(folder) / "constraints.txt"
        broken.write_text(
            re.sub(
                r"^triton==.*$",
                "triton==3.6.0",
                constraints.read_text(encoding="utf-8"),
                flags=re.M,
            )
        )
        try:
            resolve(PYTHONS[1], PLATFORMS[0], "--extra", "dev", "--constraints", str(broken))
        except ResolveError:
            print("with triton 3.6.0 pinned: refused, as it has to be")
        else:
            raise ResolveError(
                "triton 3.6.0 beside this torch resolved: this check does not see the public build"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--uv", default="uv", help="the uv command")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("action", choices=("check", "write"))
    parser.add_argument(
        "--upgrade", action="store_true", help="with write: take the newest versions"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        resolver = Resolver(
            str(Path(asked.uv).absolute()) if os.sep in asked.uv else asked.uv, Path(home)
        )
        try:
            if asked.action == "write":
                asked.constraints.write_text(
                    resolver.locked(asked.constraints, asked.upgrade), encoding="utf-8"
                )
            else:
                check(resolver, asked.constraints.absolute())
        except ResolveError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
