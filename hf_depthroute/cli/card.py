"""`hf-depthroute card`: the model card of an adapter, from its files and from measured results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..files.hub import explained
from ..files.shown import say, say_content
from . import options as o
from .errors import ADAPTER, CliError, refused
from .output import STDOUT, write_text


@dataclass(kw_only=True)
class CardOptions(o.CommandOptions):
    adapter: o.Adapter = ""
    results: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE"),
        "A file of eval --out or bench --out; once for each file.",
    ] = None
    out: Annotated[o.File, "Write here instead of ADAPTER/README.md; - for stdout."] = None
    push_to: Annotated[
        str | None,
        typer.Option(metavar="REPO"),
        "Send the adapter with the card to this repository of the Hub.",
    ] = None
    private: Annotated[bool, "With --push-to: make a new repository private."] = False
    revision: Annotated[str | None, "With --push-to: the branch; made if it is not there."] = None
    license: Annotated[str | None, "Of the metadata, such as apache-2.0."] = None
    language: Annotated[str | None, "Of the metadata, such as en."] = None
    config: o.ConfigFile = None
    adapter_option: o.OldAdapter = None


@o.command
def card(options: CardOptions) -> None:
    """Write the model card of an adapter: what is routed, what was measured, how to load it.

    Figures come from the files; what was not measured is said to be not measured. Text that you
    wrote into README.md around the generated part stays there.

    \b
    Example:
      hf-depthroute eval routed --dataset python-stdlib --split validation --out eval.json
      hf-depthroute bench routed --out bench.json
      hf-depthroute card routed --results eval.json --results bench.json --push-to me/my-router
    """
    adapter = options.adapter
    out = options.out
    push_to = options.push_to
    if push_to is None and (options.private or options.revision is not None):
        option = "--private" if options.private else "--revision"
        raise CliError(f"card: {option} goes with --push-to")
    if push_to is not None and out is not None:
        raise CliError("card: give --out or --push-to")
    from . import loading

    loading.quiet(options.debug)
    from ..card import ResultError, make_card, push_folder
    from ..card.page import put_card, updated_card
    from ..card.push import SENT

    local = Path(adapter).is_dir()
    if not local and out is None and push_to is None:
        raise CliError(
            f"adapter {adapter}: no such folder; for an adapter of the Hub give --out or --push-to"
        )
    sources = list(options.results or ())
    words: dict[str, Any] = {"license": options.license, "language": options.language}
    folder = loading.folder_of("adapter", adapter, list(SENT), ADAPTER)
    with (
        loading.explained(f"adapter {adapter}", adapter, ADAPTER),
        refused("--results ", ResultError),
    ):
        if push_to is None and out is None:
            made = updated_card(folder, sources, **words)
        else:
            made = make_card(folder, sources, **words, repo_id=None if local else adapter)
    if push_to is not None:
        with explained(f"repository {push_to}", access="write"):
            sent = push_folder(
                folder,
                push_to,
                results=sources,
                private=options.private or None,
                revision=options.revision,
                card=words,
            )
        say(f"sent {adapter} to {sent.repo_url.repo_id}: {sent.commit_url}")
    elif out is None:
        say(f"wrote {put_card(folder, made)}")
    elif out == STDOUT:
        say_content(str(made), end="")
    else:
        write_text(out, str(made))
        say(f"wrote {out}")
