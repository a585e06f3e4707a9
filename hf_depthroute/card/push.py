"""Sending an adapter with its card to the Hub."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..adapter_file import CONFIG_NAME, WEIGHTS_NAME, AdapterMismatchError
from ..adapter_folder import RefusedFileError, place_of
from ..hub import explained
from .benchmarks import OURS
from .page import routed_name, write_card
from .readme import CARD_NAME, shows_results
from .record import remembered
from .training import TRAINING_NAME

SENT = (CONFIG_NAME, WEIGHTS_NAME, CARD_NAME)


def with_card(push: Callable[..., Any]) -> Callable[..., Any]:
    """`PeftModel.push_to_hub` that sends a card of this library's for a model with a routed adapter.

    PEFT's own, which serves every other model, puts an empty template over the card that `save_pretrained` wrote.
    """

    @functools.wraps(push)
    def push_to_hub(self: Any, repo_id: str, *args: Any, results: Sequence[Any] = (), **kwargs: Any) -> Any:
        name = routed_name(self)
        if name is None:
            return push(self, repo_id, *args, **kwargs)
        tags, private, token = kwargs.pop("tags", None), kwargs.pop("private", None), kwargs.pop("token", None)
        kwargs.pop("max_shard_size", None)  # an adapter is one file
        kwargs.setdefault("commit_message", "Upload model")
        run = remembered(self, name)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            card = {"adapter_name": name, "training": run.record(self, name), "tags": tags or ()}
            return push_folder(
                folder, repo_id, results=[*run.results, *results], private=private, token=token, card=card, **kwargs
            )

    return push_to_hub


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    results: Sequence[Any] = (),
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    card: dict[str, Any] | None = None,
) -> Any:
    """Send the adapter in `folder` with a card: its configuration, its weights, README.md, and no other file but the
    scores on benchmarks that the Hub reads from `.eval_results`.

    What somebody wrote into the card on the Hub stays there; see `write_card`.

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
        HubError: The Hub refused, cannot be reached, or is not to be asked (HF_HUB_OFFLINE); in one line.
        AdapterMismatchError: A file is a link out of the folder, or as `write_card`.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as staging:
        stage = Path(staging)
        for name in (*SENT, TRAINING_NAME, OURS):
            for file in (*Path(folder).glob(name), *Path(folder).glob(f"[!.]*/{name}")):
                target = stage / file.relative_to(folder)
                if not target.relative_to(stage).parts[0].startswith("checkpoint-"):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(_in_folder(file, Path(folder)), target)
        write_card(stage, results, **(card or {}))  # before the Hub is asked for anything
        with explained(f"repository {repo_id}", access="write"):
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None and not revision.startswith("refs/pr/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            _card_of_the_hub(api, repo_id, revision, stage / CARD_NAME)
            write_card(stage, results, **{"repo_id": repo_id, **(card or {})})
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=stage,
                allow_patterns=[*SENT, *(f"*/{name}" for name in SENT), OURS],
                delete_patterns=[OURS] if results or not shows_results(stage) else None,  # of weights that went before
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message or "Upload adapter",
                commit_description=commit_description,
            )


def _in_folder(file: Path, folder: Path) -> Path:
    try:
        return place_of(file, folder)
    except (FileNotFoundError, RefusedFileError) as error:
        raise AdapterMismatchError(f"not sent: {error}") from error


def _card_of_the_hub(api: Any, repo_id: str, revision: str | None, path: Path) -> None:
    """Put the card that the Hub has in the place of the local one, if it has one."""
    from huggingface_hub.errors import EntryNotFoundError

    try:
        found = api.hf_hub_download(repo_id, CARD_NAME, revision=revision)
    except EntryNotFoundError:
        return
    shutil.copyfile(found, path)
