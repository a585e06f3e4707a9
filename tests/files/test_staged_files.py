"""Every file that is written, on a full disk, in folders of others, and under kill -9:
the old one or the new one."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aux_losses.paper.page import write_report
from models import build_base, build_routed, tokens
from moe.plots import plot_expert_load
from peft import PeftModel
from speed.result_plots import plot_result
from study.__main__ import main as study_main
from study.run import read_json
from study_results import write_study
from text_models import save_base, write_text
from transformers import AutoModelForCausalLM

import hf_depthroute
from hf_depthroute import DepthRouteConfig, calibrate, cli, get_depth_routed_model, record_routes
from hf_depthroute.adapter.files import STAGE_PREFIX
from hf_depthroute.card import write_card
from hf_depthroute.files.staged import write_bytes, write_files, write_json
from hf_depthroute.report.tokens import TokenView
from hf_depthroute.training.checkpoints import MARKER, mark_complete

OTHER_USER = 12_345
PLAN = {"a3_g1": {"endpoint": [3.0, 3.1, 3.2]}, "g1": {"endpoint": [2.0, 2.1, 2.2]}}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with the folder of its base beside it."""
    folder = tmp_path_factory.mktemp("adapter")
    save_base(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = get_depth_routed_model(base, DepthRouteConfig(layers=[1, 3], gate_hidden=8))
    calibrate(model, [{"input_ids": tokens(8, 16)}])
    model.save_pretrained(folder / "adapter")
    write_text(folder / "text.txt")
    return folder / "adapter"


def fill(disk: Path) -> None:
    """Leave not a byte."""
    with (disk / "filler").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(b"x" * 1024)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def main(words: list[str], program: Callable[[list[str]], None] = cli.main) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        program(words)
    return int(ended.value.code or 0)


def shown() -> TokenView:
    """A text as a page."""
    model = build_routed("llama").eval()
    with record_routes(model) as trace:
        model(input_ids=tokens(1, 4))
    return trace.show()


# A full disk --------------------------------------------------------------------------------------

SETTING = {"model_type": "llama", "dtype": "float32", "batch": 1, "length": 8}
ROUTED = {
    "routed_ms": 1.0,
    "ratio": 0.5,
    "speedup": 2.0,
    "eta": 1.0,
    "full_ratio": 0.5,
    "flops_routed_over_dense": 0.5,
}
BENCH = {
    "case": "prefill",
    "label": "prefill: 1 x 8",
    "batch": 1,
    "length": 8,
    "setting": SETTING,
    "dense_ms": 2.0,
    "budgets": {"0.5": ROUTED},
}
WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "bench --plot": (
        "times.png",
        lambda p: plot_result(p.parent, {"machine": {}, "measurements": [BENCH]}),
    ),
    "plots of a recipe": ("load.png", lambda p: plot_expert_load(p, {"now": {1: [0.5, 0.5]}})),
    "a token view": ("view.html", lambda p: shown().save(p)),
    "a checkpoint's marker": (MARKER, lambda p: mark_complete(p.parent)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_function_on_a_full_disk_leaves_the_old_file(small_disk: Path, name: str) -> None:
    file, write = WRITERS[name]
    (small_disk / file).write_bytes(b"old")
    fill(small_disk)
    before = content(small_disk)
    with pytest.raises(OSError) as caught:
        write(small_disk / file)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(small_disk / file)
    assert content(small_disk) == before
    (small_disk / "filler").unlink()
    write(small_disk / file)
    assert (small_disk / file).read_bytes() != b"old"


MEASURED = "{adapter} --model {base} --dataset {text} --blocks 2 --length 8"
COMMANDS: dict[str, str] = {
    "card": "card {adapter} --out {out}",
    "families": "families --json {out}",
    "eval": f"eval --json {{out}} --adapter {MEASURED}",
    "bench": (
        "bench --json {out} --adapter {adapter} --model {base} --cases prefill --batch 1 --length "
        "8 --repeats 1"
    ),
    "report": f"report --out {{out}} --no-speed {MEASURED}",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_full_disk_leaves_the_old_file(
    small_disk: Path, adapter: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = small_disk / "out.html"
    out.write_text("old")
    fill(small_disk)
    before = content(small_disk)
    places = {
        "adapter": adapter,
        "base": adapter.parent / "base",
        "text": adapter.parent / "text.txt",
        "out": out,
    }
    words = COMMANDS[command].format(**places).split()
    assert main(words) == 5, capsys.readouterr().err
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "disk full" in said and str(out) in said
    assert content(small_disk) == before


def test_a_card_on_a_full_disk_leaves_the_old_one(small_disk: Path) -> None:
    folder = small_disk / "adapter"
    build_routed("llama", gate_hidden=4, branch_rank=2).save_pretrained(folder)
    fill(small_disk)
    before = content(small_disk)
    assert main(["card", str(folder), "--license", "mit"]) == 5
    assert content(small_disk) == before


def test_a_study_report_on_a_full_disk_leaves_the_old_report_whole(
    small_disk: Path, tmp_path: Path
) -> None:
    study = write_study(tmp_path / "study", PLAN)
    out = small_disk / "report"
    out.mkdir()
    (out / "results.json").write_text("old")
    (out / "report.html").write_text("old")
    with pytest.raises(OSError) as caught:
        write_report(study, out)  # its figures are larger than the disk
    assert caught.value.errno == errno.ENOSPC
    assert content(out) == {"results.json": b"old", "report.html": b"old"}


def test_a_study_of_results_is_readable_after_a_report_into_it_on_a_full_disk(
    small_disk: Path, tmp_path: Path
) -> None:
    write_report(write_study(tmp_path / "study", PLAN), tmp_path / "report")
    folder = small_disk / "results"
    folder.mkdir()
    (folder / "results.json").write_bytes((tmp_path / "report" / "results.json").read_bytes())
    fill(small_disk)
    before = content(small_disk)
    assert main(["report", str(folder), "--out", str(folder)], study_main) == 5
    assert content(small_disk) == before
    (small_disk / "filler").unlink()
    write_report(folder, tmp_path / "again")


def test_a_study_on_a_full_disk_says_so_and_goes_on_later(
    small_disk: Path, adapter: Path, tmp_path: Path
) -> None:

    (small_disk / "study.json").write_text('{"old": 1}')
    fill(small_disk)
    with pytest.raises(OSError):
        write_json(small_disk / "study.json", {"new": "x" * 10_000})
    assert read_json(small_disk / "study.json") == {"old": 1}


# What is already there ----------------------------------------------------------------------------


def test_several_files_are_replaced_together_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError):
        write_files({tmp_path / "a": b"new", tmp_path / "missing" / "b": b"new"})
    assert content(tmp_path) == {"a": b"old"}
    write_files({tmp_path / "a": b"new", tmp_path / "b": b"new"})
    assert content(tmp_path) == {"a": b"new", "b": b"new"}


def test_a_file_keeps_its_mode_and_a_link_its_place(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640
    write_bytes(tmp_path / "link", b"own", follow=False)
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"


def test_a_device_and_a_pipe_are_written_to(tmp_path: Path) -> None:
    write_bytes(Path(os.devnull), b"nothing")
    assert Path(os.devnull).is_char_device()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_bytes(tmp_path / "out", b"new")
    assert caught.value.filename == str(tmp_path / "out")
    assert content(tmp_path) == {}


def test_a_name_of_255_bytes_can_be_written(tmp_path: Path) -> None:
    for name in ("n" * 255, "ü" * 127):
        write_bytes(tmp_path / name, b"new")
        assert (tmp_path / name).read_bytes() == b"new"


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        try:
            write_bytes(tmp_path / "file", b"killed")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".file.partial-")
    write_bytes(tmp_path / "file", b"new")
    assert content(tmp_path) == {"file": b"new"}


def test_many_writers_at_a_time_leave_one_whole_file(tmp_path: Path) -> None:
    def writer(number: int) -> None:
        for _ in range(50):
            write_bytes(tmp_path / "file", bytes([number]) * 10_000)

    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                writer(number)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    (found,) = content(tmp_path).values()
    assert len(found) == 10_000 and len(set(found)) == 1


# Folders of others, and those that nobody may write -----------------------------------------------


def as_other_user(run: Callable[[], int]) -> int:
    """The exit code of `run` in a child process that is an ordinary user."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            code = run()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def skip_where_another_user_cannot_read(*paths: Path) -> None:
    """Skip a test that needs another user who can enter these folders:
    in a home of mode 700 there is none."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    unreadable = [
        path
        for path in paths
        if as_other_user(lambda path=path: not os.access(path, os.R_OK | os.X_OK))
    ]
    if unreadable:
        pytest.skip(f"another user cannot read {unreadable[0]}")


def test_a_folder_of_another_user_is_left_alone_and_named(
    adapter: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made_by_pytest = [folder for folder in adapter.parents[1:] if folder.name.startswith("pytest-")]
    for path in (*adapter.iterdir(), adapter, adapter.parent, *made_by_pytest):
        path.chmod(path.stat().st_mode | 0o055)  # to be read and entered
    skip_where_another_user_cannot_read(Path(hf_depthroute.__file__).parent, adapter)
    for command in ("card", "doctor"):  # imports what the other user may not read
        main([command, str(adapter)])
    capfd.readouterr()
    before = content(adapter)
    assert as_other_user(lambda: main(["card", str(adapter)])) == 2
    assert f"{adapter / 'README.md'}: Permission denied" in capfd.readouterr().err
    assert (
        as_other_user(
            lambda: main(["card", str(adapter), "--out", str(adapter / "new" / "card.md")])
        )
        == 2
    )
    assert "Permission denied" in capfd.readouterr().err
    assert as_other_user(lambda: main(["doctor", str(adapter)])) == 0
    assert content(adapter) == before


def test_an_adapter_on_a_read_only_disk_loads_and_cannot_be_changed(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_routed("llama", gate_hidden=4, branch_rank=2)
    model.save_pretrained(small_disk)
    (small_disk / f"{STAGE_PREFIX}left").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    before = content(small_disk)
    PeftModel.from_pretrained(build_base("llama"), small_disk)
    assert main(["card", str(small_disk), "--out", "-"]) == 0
    assert main(["card", str(small_disk)]) == 2
    assert "README.md: Read-only file system" in capsys.readouterr().err
    with pytest.raises(OSError, match="Read-only file system"):
        model.save_pretrained(small_disk)
    assert content(small_disk) == before


# kill -9 ------------------------------------------------------------------------------------------


def killed(run: Callable[[], Any], look: Callable[[], None], rounds: int, longest: float) -> None:
    """Call `run` again and again in a child that is killed at a random moment, then `look`."""
    moments = random.Random(0)
    for _ in range(rounds):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    run()
            finally:
                os._exit(1)
        time.sleep(moments.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it ended before it was killed"
        look()


def test_a_killed_card_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    build_routed("llama").save_pretrained(tmp_path)
    cards = []
    for license in ("mit", "apache-2.0"):
        write_card(tmp_path, license=license)
        cards.append((tmp_path / "README.md").read_bytes())

    def both() -> None:
        for license in ("mit", "apache-2.0"):
            write_card(tmp_path, license=license)

    def look() -> None:
        assert (tmp_path / "README.md").read_bytes() in cards

    killed(both, look, rounds=20, longest=0.2)
    both()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.nightly
def test_a_killed_report_leaves_whole_files(tmp_path: Path) -> None:
    studies = [write_study(tmp_path / name, PLAN, name=name) for name in ("one", "two")]
    whole: dict[str, set[bytes]] = {}
    for study in (*studies, studies[0]):
        write_report(study, tmp_path / "out")
        for name, found in content(tmp_path / "out").items():
            whole.setdefault(name, set()).add(found)

    def look() -> None:
        found = {
            name: text
            for name, text in content(tmp_path / "out").items()
            if ".partial-" not in name
        }
        assert found.keys() == whole.keys()
        assert all(text in whole[name] for name, text in found.items())
        json.loads(found["results.json"])

    killed(
        lambda: [write_report(study, tmp_path / "out") for study in studies],
        look,
        rounds=8,
        longest=3.0,
    )
