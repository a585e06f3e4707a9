"""An adapter's folder and a run's folder after kill -9, a full disk, and two writers at a time."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build_base, build_routed, logits, routed
from peft import PeftModel
from places import HELPERS, ROOT
from training import adapter_state, assert_same_tensors, make_trainer, rows

import hf_depthroute.adapter.saving
import hf_depthroute.training.checkpoints
from hf_depthroute.adapter.files import CONFIG_NAME, WEIGHTS_NAME
from hf_depthroute.training.checkpoints import MARKER, CheckpointError, fault_of, rotate

WORKER = HELPERS / "kill_worker.py"


def worker(folder: Path, **rounds: int) -> dict[str, dict[str, Any]]:
    """What each kind of damage left, after as many rounds; all in one process,
    which takes seconds to start."""
    path = os.pathsep.join([str(WORKER.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        str(WORKER),
        str(folder),
        *(str(word) for pair in rounds.items() for word in pair),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.fixture(scope="module")
def by_day(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One kind of each: a save, two at once, and a training."""
    return worker(tmp_path_factory.mktemp("killed"), renames=20, writers=3, checkpoints=2)


@pytest.mark.nightly
def test_a_killed_save_leaves_the_old_adapter_or_the_new_one(tmp_path: Path) -> None:
    found = worker(tmp_path, saves=60)["saves"]
    assert found.pop("leftovers") == 0
    assert found.keys() <= {"one", "two"}
    assert sum(found.values()) == 60


def test_a_save_that_dies_at_any_rename_or_sync_leaves_one_of_them(
    by_day: dict[str, dict[str, Any]],
) -> None:
    found = by_day["renames"]
    assert {found[name] for name in found} == {"old", "new"}
    for name in ("default", "named"):  # weights, config, card; and each of them, and the folders
        assert sum(point.startswith(f"{name} replace") for point in found) >= 3
        assert sum(point.startswith(f"{name} fsync") for point in found) >= 5


def test_two_writers_leave_one_whole_adapter(by_day: dict[str, dict[str, Any]]) -> None:
    found = by_day["writers"]
    assert found.pop("exit code 0") == 6
    assert found.keys() <= {"one", "two"} and sum(found.values()) == 3


def test_a_killed_run_resumes_to_the_end_of_an_uninterrupted_one(
    by_day: dict[str, dict[str, Any]],
) -> None:
    found = by_day["checkpoints"]
    assert "different at the end" not in found
    assert found["equal at the end"] >= 1


@pytest.mark.nightly
def test_runs_killed_at_more_moments_resume_to_the_same_end(tmp_path: Path) -> None:
    found = worker(tmp_path, checkpoints=6)["checkpoints"]
    assert "different at the end" not in found
    assert found["equal at the end"] >= 1


@pytest.mark.nightly
def test_training_over_an_adapter_that_dies_at_any_rename_leaves_one_of_them_and_all_else(
    tmp_path: Path,
) -> None:
    found = worker(tmp_path, overwrites=30)["overwrites"]
    assert found.pop("ended") == 0
    assert len(found) > 6  # the adapter, the card, the tokenizer and the record
    assert {name for name, _, _ in found.values()} == {"seed 1", "seed 2"}
    assert {(doctor, kept) for _, doctor, kept in found.values()} == {(0, "[core]")}


# In one process -----------------------------------------------------------------------------------


def test_saving_keeps_what_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\ntags: [mine]\n---\nMy own words.\n")
    (tmp_path / "notes.txt").write_text("kept")
    model = build_routed("llama", "mlp")
    model.save_pretrained(tmp_path)
    assert "My own words." in (tmp_path / "README.md").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "README.md",
        CONFIG_NAME,
        WEIGHTS_NAME,
        "notes.txt",
    ]


def test_named_adapters_are_sealed_in_their_own_folders(tmp_path: Path) -> None:
    model = routed(build_base("llama"), "mlp", adapter_name="first")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "first" / CONFIG_NAME).read_text())
    assert config["weights_hash"].startswith("sha256:") and config["format_version"] == 1
    assert [p.name for p in tmp_path.iterdir()] in (["first", "README.md"], ["README.md", "first"])


def test_pickles_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="safetensors format only"):
        build_routed("llama", "mlp").save_pretrained(tmp_path / "a", safe_serialization=False)
    assert not (tmp_path / "a").exists()


def test_a_folder_that_another_process_holds_is_a_lock_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    model = build_routed("llama", "mlp")
    model.save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr(hf_depthroute.adapter.source, "LOCK_SECONDS", 0.2)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(OSError, match="another process has been saving there") as caught:
        model.save_pretrained(tmp_path)
    os.close(held)
    assert caught.value.filename == str(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    model.save_pretrained(tmp_path)


def test_an_error_while_saving_leaves_no_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("peft.peft_model.safe_save_file", broken)
    with pytest.raises(RuntimeError, match="no"):
        build_routed("llama", "mlp").save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_the_earlier_adapter(small_disk: Path) -> None:
    folder = small_disk / "adapter"
    model = build_routed("llama", "mlp", gate_hidden=4, branch_rank=2)
    model.save_pretrained(folder)
    expected = logits(model)
    other = build_routed("llama", "mlp", gate_hidden=256, branch_rank=2, seed=3)
    with pytest.raises(
        OSError, match=r"disk full while saving the adapter: more than [\d,]+ bytes"
    ) as caught:
        other.save_pretrained(folder)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(folder)
    assert "intact" in str(caught.value)
    assert not list(folder.glob(".saving-*"))
    assert torch.equal(
        logits(PeftModel.from_pretrained(build_base("llama"), folder).eval()), expected
    )


def test_a_full_disk_names_the_checkpoint_and_the_last_whole_one(small_disk: Path) -> None:
    model = build_routed("llama", "mlp")
    trainer, _ = make_trainer(
        model, rows(16), small_disk / "run", save_strategy="steps", save_steps=1
    )
    with pytest.raises(OSError, match=r"disk full while saving .*checkpoint-\d+") as caught:
        trainer.train()
    assert caught.value.errno == errno.ENOSPC
    assert "whole checkpoint" in str(caught.value)


# Checkpoints --------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with three checkpoints."""
    model = build_routed("llama", "mlp")
    trainer, _ = make_trainer(model, rows(6), tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    return tmp_path


DAMAGES: dict[str, Any] = {
    "no marker": lambda c: (c / MARKER).unlink(),
    "marker of half": lambda c: (c / MARKER).write_text((c / MARKER).read_text()[:40]),
    "empty folder": lambda c: [p.unlink() for p in c.iterdir()],
    "no optimizer": lambda c: (c / "optimizer.pt").unlink(),
    "half an optimizer": lambda c: (c / "optimizer.pt").write_bytes(
        (c / "optimizer.pt").read_bytes()[:100]
    ),
    "no state": lambda c: (c / "trainer_state.json").unlink(),
    "no random state": lambda c: (c / "rng_state.pth").unlink(),
    "no weights": lambda c: (c / WEIGHTS_NAME).unlink(),
    "flipped weights": lambda c: (c / WEIGHTS_NAME).write_bytes(
        (c / WEIGHTS_NAME).read_bytes()[:-1] + b"\x11"
    ),
}


@pytest.mark.nightly(
    unless=lambda damage: damage in ("no marker", "half an optimizer", "flipped weights")
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named(run: Path, damage: str) -> None:
    DAMAGES[damage](run / "checkpoint-3")
    assert fault_of(run / "checkpoint-3") is not None
    trainer, _ = make_trainer(build_routed("llama", "mlp", seed=5), rows(6), run)
    with pytest.warns(UserWarning, match="passed over checkpoint-3: "):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    trainer, _ = make_trainer(build_routed("llama", "mlp"), rows(6), run)
    with pytest.raises(
        CheckpointError, match=r"checkpoint-3: cannot be resumed from: .*; resume from checkpoint-2"
    ):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-3"))


def test_a_run_without_a_whole_checkpoint_says_so(run: Path) -> None:
    for checkpoint in run.glob("checkpoint-*"):
        (checkpoint / MARKER).unlink()
    trainer, _ = make_trainer(build_routed("llama", "mlp"), rows(6), run)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint is whole \(checkpoint-3: it was not saved to the end"
    ):
        trainer.train(resume_from_checkpoint=True)


def test_older_checkpoints_stay_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[list[str]] = []

    def look(folder: Path) -> None:
        there.append(
            sorted(p.name for p in folder.parent.glob("checkpoint-*") if (p / MARKER).is_file())
        )
        mark(folder)

    mark = hf_depthroute.training.checkpoints.mark_complete
    monkeypatch.setattr(hf_depthroute.training.checkpoints, "mark_complete", look)
    fields = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer, _ = make_trainer(build_routed("llama", "mlp"), rows(6), tmp_path, **fields)
    trainer.train()
    assert there == [[], ["checkpoint-1"], ["checkpoint-2"]]
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


TIMES = st.lists(st.integers(min_value=-(2**31), max_value=2**33), min_size=5, max_size=5)


@settings(max_examples=30, deadline=None)
@given(
    times=TIMES,
    limit=st.integers(1, 4),
    best=st.sampled_from([None, 1, 3]),
    went_back=st.booleans(),
)
def test_rotation_goes_by_step_whatever_the_modification_times(
    times: list[int], limit: int, best: int | None, went_back: bool
) -> None:
    with tempfile.TemporaryDirectory() as run:
        folders = {step: Path(run) / f"checkpoint-{step}" for step in (1, 3, 9, 10, 100)}
        for folder, when in zip(folders.values(), times):
            folder.mkdir()
            os.utime(folder, (when, when))
        newest = 9 if went_back else 100
        rotate(folders[newest], limit, folders[best] if best else None)
        left = {step for step, folder in folders.items() if folder.exists()}
    protected = {newest, best} - {None}
    assert protected <= left and len(left) == max(limit, len(protected))
    assert max(folders.keys() - left) < min(left - protected, default=101)


def test_checkpoints_of_the_future_do_not_cost_the_new_ones(tmp_path: Path) -> None:
    """A clock that was set back, or a backup that was restored, between two parts of a run."""
    fields = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer, _ = make_trainer(build_routed("llama", "mlp"), rows(4), tmp_path, **fields)
    trainer.train()
    future = time.time() + 10_000
    for number, checkpoint in enumerate(sorted(tmp_path.glob("checkpoint-*"))):
        os.utime(checkpoint, (future + 100 * number, future + 100 * number))
    trainer, _ = make_trainer(build_routed("llama", "mlp"), rows(8), tmp_path, **fields)
    trainer.train(resume_from_checkpoint=True)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert all(fault_of(p) is None for p in tmp_path.glob("checkpoint-*"))


def test_training_goes_on_from_an_adapter_that_was_loaded(tmp_path: Path) -> None:
    """The hash of the file that was loaded says nothing about what is saved later."""
    build_routed("llama", "mlp").save_pretrained(tmp_path / "start")

    def trainer(folder: Path) -> Any:
        model = PeftModel.from_pretrained(
            build_base("llama"), tmp_path / "start", is_trainable=True
        )
        return make_trainer(model, rows(6), folder, save_strategy="steps", save_steps=1)[0]

    whole = trainer(tmp_path / "run")
    whole.train()
    resumed = trainer(tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert_same_tensors(adapter_state(whole.model), adapter_state(resumed.model))
