"""Sending an adapter with its card to the Hub."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError

from ..adapter.files import CARD_NAME, CONFIG_NAME, WEIGHTS_NAME, AdapterMismatchError
from ..files.hub import explained
from ..files.untrusted import RefusedFileError, place_of
from .facts import TRAINING_NAME
from .page import write_card

SENT = (CONFIG_NAME, WEIGHTS_NAME, CARD_NAME)


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    results: Sequence[object] = (),
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    card: dict[str, object] | None = None,
) -> Any:
    """Send the adapter in `folder` with a card: its configuration, its weights, README.md,
    and no other file.

    Text of the user's in the card on the Hub stays there; see `write_card`.

    Args:
        folder: As `save_pretrained` leaves it; its README.md is not changed.
        repo_id: `user/name`, or `name` in the token's own namespace. Created if it does not exist.
        results: As for `make_card`.
        private: Whether a repository that is created is private.
        token: As in `huggingface_hub`; by default that of `hf auth login` or HF_TOKEN.
        revision: Branch; created if it does not exist.
        create_pr: Open a pull request instead.
        commit_message: The commit's first line.
        commit_description: The rest of its message.
        card: More arguments of `write_card`.

    Returns:
        The `huggingface_hub.CommitInfo`.

    Raises:
        ResultError: As `make_card`, and before anything is sent.
        HubError: The Hub refused, cannot be reached, or is not to be asked (HF_HUB_OFFLINE); in one
            line.
        AdapterMismatchError: A file is a link out of the folder, or as `write_card`.
    """
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as staging:
        stage = Path(staging)
        _copy(Path(folder), stage)
        write_card(stage, results, **(card or {}))  # before the Hub is asked for anything
        with explained(f"repository {repo_id}", access="write"):
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None and not revision.startswith("refs/pr/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            # The card that the Hub has, if it has one.
            with contextlib.suppress(EntryNotFoundError):
                card_there = api.hf_hub_download(repo_id, CARD_NAME, revision=revision)
                shutil.copyfile(card_there, stage / CARD_NAME)
            write_card(stage, results, **{"repo_id": repo_id, **(card or {})})
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=stage,
                allow_patterns=[*SENT, *(f"*/{name}" for name in SENT)],
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message or "Upload adapter",
                commit_description=commit_description,
            )


def _copy(folder: Path, stage: Path) -> None:
    """Copy what is sent, and what the card is made of, of the adapters in `folder`."""
    for name in (*SENT, TRAINING_NAME):
        for file in (*folder.glob(name), *folder.glob(f"[!.]*/{name}")):
            place = file.relative_to(folder)
            if not place.parts[0].startswith("checkpoint-"):
                (stage / place).parent.mkdir(exist_ok=True)
                try:
                    shutil.copyfile(place_of(file, folder), stage / place)
                except (FileNotFoundError, RefusedFileError) as error:
                    raise AdapterMismatchError(f"not sent: {error}") from error
