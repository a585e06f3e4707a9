"""`hf-depthroute card`: the model card of an adapter, from its files and from measured results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..shown import say, say_content
from . import options as o
from .adapter import Adapter, OldAdapter
from .errors import ADAPTER, CliError
from .output import write_text


def card(
    adapter: Adapter = "",
    results: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A file of eval --out or bench --out; once for each file."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write here instead of ADAPTER/README.md; - for stdout.")
    ] = None,
    push_to: Annotated[
        str | None, typer.Option(metavar="REPO", help="Send the adapter with the card to this repository of the Hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push-to: make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="With --push-to: the branch; made if it is not there.")] = None,
    license: Annotated[str | None, typer.Option(help="Of the metadata, such as apache-2.0.")] = None,
    language: Annotated[str | None, typer.Option(help="Of the metadata, such as en.")] = None,
    config: o.ConfigFile = None,
    adapter_option: OldAdapter = None,
    debug: o.Debug = False,
) -> None:
    """Write the model card of an adapter: what is routed, what was measured, how to load it.

    Figures come from the files; what was not measured is said to be not measured. Text that you wrote into README.md
    around the generated part stays there.

    \b
    Example:
      hf-depthroute eval routed --dataset python-stdlib --split validation --out eval.json
      hf-depthroute bench routed --out bench.json
      hf-depthroute card routed --results eval.json --results bench.json --push-to me/my-router
    """
    if push_to is None and (private or revision is not None):
        raise CliError(f"card: {'--private' if private else '--revision'} goes with --push-to")
    if push_to is not None and out is not None:
        raise CliError("card: give --out or --push-to")
    from . import loading

    loading.quiet(debug)
    from ..card import make_card, push_folder
    from ..card.page import put_card, updated_card

    local = Path(adapter).is_dir()
    if not local and out is None and push_to is None:
        raise CliError(f"adapter {adapter}: no such folder; for an adapter of the Hub give --out or --push-to")
    sources: list[Path] = list(results or ())
    words: dict[str, Any] = {"license": license, "language": language}
    with _explained(adapter):
        folder = Path(adapter) if local else _downloaded(adapter)
        if push_to is None and out is None:
            made, scores = updated_card(folder, sources, **words)
        else:
            made, scores = make_card(folder, sources, **words, repo_id=None if local else adapter), None
    if push_to is None and out is None:
        say(f"wrote {put_card(folder, made, scores)}")
    elif push_to is not None:
        with _of_repository(push_to):
            sent = push_folder(folder, push_to, results=sources, private=private or None, revision=revision, card=words)
        say(f"sent {adapter} to {sent.repo_url.repo_id}: {sent.commit_url}")
    elif str(out) == "-":
        say_content(str(made), end="")
    elif out is not None:
        write_text(out, str(made))
        say(f"wrote {out}")


@contextlib.contextmanager
def _explained(adapter: str) -> Iterator[None]:
    from ..card import ResultError
    from . import loading

    with loading.explained(f"adapter {adapter}", adapter, ADAPTER):
        try:
            yield
        except ResultError as error:
            raise CliError(f"--results {error}") from error


def _downloaded(adapter: str) -> Path:
    from huggingface_hub import snapshot_download

    from ..card.push import SENT

    return Path(snapshot_download(adapter, allow_patterns=list(SENT)))


@contextlib.contextmanager
def _of_repository(name: str) -> Iterator[None]:
    """What the Hub says against a repository that is written to, as a `HubError` about it."""
    from ..hub import explain

    try:
        yield
    except Exception as error:
        found = explain(error, f"repository {name}", access="write")
        if found is None:
            raise
        raise found from error
