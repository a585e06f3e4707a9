"""Whatever stands on the command line: an exit code of the table, at most one line of error,
no traceback."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hf_depthroute.cli import app, main

COMMANDS = (
    *(
        "train",
        "fit",
        "eval",
        "bench",
        "generate",
        "play",
        "serve",
        "lm-eval",
        "vllm-config",
        "report",
        "card",
        "doctor",
        "convert",
    ),
    "families",
)
OPTIONS = (
    *(
        "--model",
        "--adapter",
        "--dataset",
        "--out",
        "--config",
        "--budget",
        "--budgets",
        "--layers",
        "--gate",
    ),
    *(
        "--steps",
        "--length",
        "--dtype",
        "--repeats",
        "--batch",
        "--compare",
        "--prompt",
        "--seed",
        "--threads",
    ),
    *(
        "--json",
        "--debug",
        "--overwrite",
        "--full",
        "--lossless",
        "--lr",
        "--help",
        "--allow-base-mismatch",
    ),
)
VALUES = [
    "",
    "0",
    "-1",
    "0.5",
    "nan",
    "1e999",
    "last:2",
    "1,2",
    "all",
    "x" * 300,
    "/nonexistent",
    ".",
    "\0",
]
WORDS = st.one_of(
    st.sampled_from(
        [
            "",
            "0",
            "-1",
            "0.5",
            "nan",
            "1e999",
            "last:2",
            "1,2",
            "all",
            "x" * 300,
            "/nonexistent",
            ".",
            "\0",
        ]
    ),
    st.text(max_size=20),
    st.integers().map(str),
    st.floats().map(str),
)
ARGV = st.lists(st.one_of(st.sampled_from(COMMANDS), st.sampled_from(OPTIONS), WORDS), max_size=8)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a run may write do not land in the repository, and nobody types a prompt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(argv=ARGV)
@example(argv=["doctor", "\0"])
@example(argv=["generate", "--adapter", "\0", "--prompt", "x"])
@example(argv=["train", "--model", ".", "--dataset", ".", "--out", "."])
@example(argv=["bench", "--compare", ".", "."])
@example(argv=["report", "/nonexistent"])
@example(argv=["--debug"])
@example(argv=["generate", "train"])
@example(argv=["fit", "--model", ".", "--dataset", ".", "--out", "."])
def test_any_argv_ends_in_order(argv: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as caught,
    ):
        main(argv)
    said = err.getvalue()
    assert caught.value.code in (0, 2, 3, 4, 5)
    assert "Traceback" not in said + out.getvalue() or "--debug" in argv
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == (caught.value.code != 0)
    if caught.value.code:
        assert said.rstrip("\n").splitlines()[-1] == errors[0]


def test_the_commands_are_all_of_them() -> None:
    assert {command.name for command in app.registered_commands if not command.hidden} == set(
        COMMANDS
    )


NEEDED = {
    "train": ["--model", "m", "--dataset", "d", "--out", "o"],
    "fit": ["--model", "m", "--dataset", "d", "--out", "o"],
    "generate": ["adapter", "--prompt", "x"],
}


def numeric_options(kind: type) -> list[tuple[str, str]]:
    """Every option of this type: a command and what the command line calls it."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = []
    for name, command in commands.items():
        for parameter in command.params:
            described = getattr(parameter, "type_descriptor", None)
            if described is not None and described.annotation in (kind, kind | None):
                found.append((name, parameter.opts[0]))
    return found


def said_by(argv: list[str]) -> tuple[int, str]:
    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises(SystemExit) as caught:
        main(argv)
    return caught.value.code, err.getvalue()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_no_option_takes_a_number_that_is_not_finite(value: str) -> None:
    options = [(command, option) for command, option in numeric_options(float) if command in NEEDED]
    assert len(options) > 20
    for command, option in options:
        code, said = said_by([command, *NEEDED[command], option, value])
        assert code == 2 and option in said, (command, option, said)


def test_every_seed_has_the_range_of_what_it_seeds() -> None:
    options = [(command, option) for command, option in numeric_options(int) if option == "--seed"]
    assert {command for command, _ in options} >= {"train", "fit", "generate"}
    for command, option in options:
        for value in (-1, 2**32, 2**64):
            code, said = said_by([command, *NEEDED.get(command, []), option, str(value)])
            assert code == 2 and option in said, said


def test_a_file_in_the_place_of_the_root_is_refused() -> None:
    for command in (["families"], ["eval", "x", "--dataset", "d"], ["bench", "x"]):
        code, said = said_by([*command, "--out", "/"])
        assert code == 2 and "--out /: is a folder; name a file" in said
