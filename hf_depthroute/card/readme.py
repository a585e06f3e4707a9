"""The README in an adapter's folder: it may hold text of the user's, and may come from a stranger.

It is read within bounds, its metadata at most 64 KiB, and in steps that are linear in its length.
Metadata that cannot be read is left out; the text is the user's, and is kept.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ..adapter.files import CARD_NAME, AdapterMismatchError, read_readme
from ..files.strict_yaml import parse_mapping
from .escaping import hub_id, literal

PLACEHOLDER = "path/to/this/folder"
MEASURED = "<!-- with results -->"
BEGIN = "<!-- hf_depthroute: generated, {} -->"
END = "<!-- hf_depthroute: end of the generated part -->"
_BEGIN = re.compile(re.escape(BEGIN).replace(r"\{\}", r"(\w{1,64})") + r"\n")
_METADATA = re.compile(r"\s*^---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.MULTILINE | re.DOTALL)
_MAX_METADATA = 1 << 16


class Card(ModelCard):
    """A card of metadata and text; `ModelCard` itself would search the text for metadata again."""

    def __init__(self, data: ModelCardData, text: str) -> None:
        super().__init__("---\n{}\n---\n")
        self.data = data
        self.text = text


def old_card(folder: Path) -> Card | None:
    """The README of a folder as a card; None if there is none. Errors are those of `read_readme`
    and `parse_readme`."""
    try:
        return parse_readme(read_readme(folder))
    except FileNotFoundError:
        return None


def parse_readme(content: bytes) -> Card:
    """A README's metadata, of which more than 64 KiB are refused, and its text."""
    text = re.sub("\r\n?", "\n", content.decode("utf-8-sig", errors="replace"))
    metadata = ""
    if found := _METADATA.match(text):
        metadata = found[1]
        text = text[found.end() :]
    if len(metadata) > _MAX_METADATA:
        raise AdapterMismatchError(
            f"{CARD_NAME}: its metadata is larger than {_MAX_METADATA:,} characters"
        )
    try:
        fields = parse_mapping(metadata, CARD_NAME)
        card = Card(ModelCardData(**fields, ignore_metadata_errors=True), text)
        str(card).encode()
        return card
    except Exception:  # whatever a stranger's metadata makes the parsers do
        return Card(ModelCardData(), text)


def merge(old: ModelCard, new: Card, repo_id: str | None) -> Card:
    """`old` with the generated part and the metadata of `new`; the user's text stays."""
    ours = generated_part(new.text)
    assert ours is not None
    part = new.text[ours[0]]
    metadata = new.data.to_dict()
    known = old.data.to_dict()
    before = generated_part(old.text)
    if before is not None:
        there = old.text[before[0]]
        if before[1] == ours[1] and MEASURED in there and MEASURED not in part:
            part = there
            if repo_id is not None:
                named = f"adapter = {literal(repo_id)}"
                part = part.replace(f"adapter = {literal(PLACEHOLDER)}", named)
        else:
            known.pop("model-index", None)
        text = old.text[: before[0].start] + part + old.text[before[0].stop :]
    elif _is_template(old.text):
        text = new.text
    else:
        text = f"{old.text.rstrip()}\n\n{part}\n"
    tags = dict.fromkeys(metadata.get("tags") or ())
    theirs = known.get("tags")
    if isinstance(theirs, list):
        tags |= dict.fromkeys(map(str, theirs))
    if hub_id(known.get("base_model")) is None:  # PEFT puts the path of a folder there
        known.pop("base_model", None)
    kept = {str(name): value for name, value in known.items()}
    merged = {**metadata, **kept, **metadata, "tags": list(tags)}  # in the order of `metadata`
    return Card(ModelCardData(**merged, ignore_metadata_errors=True), text)


def generated_part(text: str) -> tuple[slice, str] | None:
    """Where the generated part of a card is, with its two comments, and the digest it names."""
    begin = _BEGIN.search(text)
    if begin is None:
        return None
    end = text.find(END, begin.end())
    if end < 0:
        return None
    return slice(begin.start(), end + len(END)), begin[1]


def _is_template(text: str) -> bool:
    """Whether the card is the empty one that PEFT saves, without text of the user's."""
    found = text.split("### Framework versions")[0].split()
    return found in ([], ModelCard.from_template(ModelCardData()).text.split())
