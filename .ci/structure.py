"""The shape of a package, read from its source: what imports what, how deep, in circles or not,
and what is long.

`python .ci/structure.py [PACKAGE_DIR]`. A room is a subpackage right below the package; a module
that stands there alone counts as one where rooms are compared. Imports inside functions count as
the others do, those that only a type checker makes (`if TYPE_CHECKING:`) apart. Nothing is imported
to find this out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# A room imports itself and what stands in the lines above its own; rooms of one line do not import
# each other.
ORDER = """
version
files
base data
parts
config
routing
execution
adapter
inference
training
evaluation
fitting
bench
report
card
registration
play vllm
cli
__init__ __main__
"""


class Arrow(NamedTuple):
    """`source` imports `target`, both named below the package: `routing.trace`,
    and `__init__` for the package."""

    source: str
    target: str
    line: int
    typing: bool  # for a type checker only
    lazy: bool  # inside a function


def read_modules(package: Path) -> dict[str, ast.Module]:
    """Every module of the package by its name; a subpackage's `__init__` has the
    subpackage's name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
        found[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def read_arrows(package: Path) -> list[Arrow]:
    """Every import of a module of the package by another."""
    modules = read_modules(package)
    arrows = set()
    for source, tree in modules.items():
        inside = source == "__init__" or (package / source.replace(".", "/")).is_dir()
        here = [package.name, *([] if source == "__init__" else source.split("."))]
        for node, typing, lazy in _walk(tree):
            for name in _imported(node, here if inside else here[:-1]):
                below = name.split(".")[1:]
                known = (".".join(below[:n]) for n in range(len(below), 0, -1))
                target = next((n for n in known if n in modules), "__init__")
                if name.split(".")[0] == package.name and target != source:
                    arrows.add(Arrow(source, target, node.lineno, typing, lazy))
    return sorted(arrows)


def _walk(
    node: ast.AST, typing: bool = False, lazy: bool = False
) -> Iterator[tuple[ast.stmt | ast.expr, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom, ast.Call)):
            yield child, typing, lazy
        checked = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        yield from _walk(
            child,
            typing or checked,
            lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)),
        )


def _imported(node: ast.AST, here: list[str]) -> Iterator[str]:
    """Full names of what is imported: `from .x import y` and `import_module(".x", ...)` in the
    package `here` too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        start = here[: len(here) - node.level + 1] if node.level else []
        for alias in node.names:
            yield ".".join([*start, *([node.module] if node.module else []), alias.name])
    elif (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("import_module")
        and node.args
    ):
        name = getattr(node.args[0], "value", None)
        if isinstance(name, str):
            dots = len(name) - len(name.lstrip("."))
            yield ".".join([*(here[: len(here) - dots + 1] if dots else []), name.lstrip(".")])


def room_of(module: str) -> str:
    return module.split(".")[0]


def edges_of(arrows: Iterable[Arrow], rooms: bool = False) -> set[tuple[str, str]]:
    """Who imports whom, between modules or between rooms."""
    pairs = (
        (room_of(a.source), room_of(a.target)) if rooms else (a.source, a.target) for a in arrows
    )
    return {(source, target) for source, target in pairs if source != target}


def groups_of(edges: set[tuple[str, str]]) -> list[set[str]]:
    """Strongly connected components, the imported before those that import them
    (Tarjan's algorithm)."""
    after: dict[str, list[str]] = {name: [] for edge in edges for name in edge}
    for source, target in sorted(edges):
        after[source].append(target)
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in after[name]:
            if target not in order:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == order[name]:
            found.append(set(stack[stack.index(name) :]))
            del stack[stack.index(name) :]

    for name in after:
        if name not in order:
            visit(name)
    return found


def circles_of(edges: set[tuple[str, str]]) -> list[set[str]]:
    return [group for group in groups_of(edges) if len(group) > 1]


def levels_of(edges: set[tuple[str, str]]) -> dict[str, int]:
    """How many imports deep each is, from 0; all of a circle are on one level."""
    levels: dict[str, int] = {}
    for group in groups_of(edges):
        below = [
            levels[target] for source, target in edges if source in group and target not in group
        ]
        levels |= dict.fromkeys(group, max(below, default=-1) + 1)
    return levels


def upward(arrows: Iterable[Arrow]) -> list[Arrow]:
    """Arrows from one room to another that `ORDER` does not have above it."""
    level = {
        room: number
        for number, line in enumerate(ORDER.strip().splitlines())
        for room in line.split()
    }
    pairs = [(a, room_of(a.source), room_of(a.target)) for a in arrows]
    return [a for a, source, target in pairs if source != target and level[source] <= level[target]]


def functions_of(modules: dict[str, ast.Module]) -> Iterator[tuple[str, int, int]]:
    """`(name, lines, parameters)` of every function; `self` and `cls` are no parameters."""
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                a = node.args
                given = [
                    arg
                    for arg in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg)
                    if arg is not None
                ]
                named = [arg for arg in given if arg.arg not in ("self", "cls")]
                yield f"{module}.{node.name}", (node.end_lineno or 0) - node.lineno + 1, len(named)


def describe(package: Path) -> Iterator[str]:
    """The shape of a package, a line each."""
    modules, arrows = read_modules(package), read_arrows(package)
    running = [a for a in arrows if not a.typing]
    top = {room_of(name) for name in modules}
    rooms = sorted(room for room in top if (package / room).is_dir())
    yield f"lines: {sum(len(path.read_text().splitlines()) for path in package.rglob('*.py')):,}"
    yield f"modules: {len(modules)}, of which {len(top) - len(rooms)} at the top"
    yield f"rooms: {len(rooms)} ({', '.join(rooms)})"
    for what, between_rooms in (("modules", False), ("rooms", True)):
        edges = edges_of(running, between_rooms)
        circles = circles_of(edges)
        lazy = edges - edges_of([a for a in running if not a.lazy], between_rooms)
        yield (
            f"arrows between {what}: {len(edges)} ({len(lazy)} in functions only; for type "
            f"checkers only {len(edges_of(arrows, between_rooms) - edges)}), "
            f"{max(levels_of(edges).values(), default=0) + 1} levels, {len(circles)} circles"
        )
        yield from (f"  circle of {len(circle)}: {', '.join(sorted(circle))}" for circle in circles)
    if top <= set(ORDER.split()):
        rising = upward(arrows)
    else:  # no order was agreed on: what only functions import, and what closes a circle
        circles = circles_of(edges_of(running, rooms=True))
        pairs = [(a, {room_of(a.source), room_of(a.target)}) for a in running if a.lazy]
        rising = [
            a for a, pair in pairs if len(pair) > 1 and any(pair <= circle for circle in circles)
        ]
    yield f"arrows upward: {len({(a.source, a.target) for a in rising})}"
    for a in rising:
        yield f"  {a.source} -> {a.target} (line {a.line}{', typing' if a.typing else ''})"
    functions = list(functions_of(modules))
    name, lines, _ = max(functions, key=lambda f: f[1])
    yield (
        f"longest function: {name}, {lines} lines ({sum(f[1] > 50 for f in functions)} are longer "
        "than 50)"
    )
    name, _, count = max(functions, key=lambda f: f[2])
    yield (
        f"most parameters: {name}, {count} ({sum(f[2] > 8 for f in functions)} functions have more "
        "than 8)"
    )


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "hf_depthroute"
    print("\n".join(describe(place)))
