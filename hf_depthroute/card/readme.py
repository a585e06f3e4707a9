"""The README that stands in an adapter's folder: somebody may have written in it, and anybody may have made it.

It is read within bounds, its metadata at most 64 KiB, and in steps that are linear in its length. Metadata that cannot
be read is left out; the text is somebody's, and is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..adapter_file import AdapterMismatchError
from ..adapter_folder import RefusedFileError, read_file
from .text import hub_id, literal

CARD_NAME = "README.md"
PLACEHOLDER = "path/to/this/folder"
MEASURED = "<!-- with results -->"
BEGIN, END = "<!-- hf_depthroute: generated, {} -->", "<!-- hf_depthroute: end of the generated part -->"
_BEGIN = re.compile(re.escape(BEGIN).replace(r"\{\}", r"(\w{1,64})") + r"\n")
_RULE = re.compile(r"^---[ \t]*$", re.MULTILINE)
_MAX_BYTES = 1 << 20
_MAX_METADATA = 1 << 16


def read_readme(folder: Path) -> ModelCard | None:
    """The README of a folder; None where there is none.

    Raises:
        AdapterMismatchError: As `read_readme_file`; or its metadata is larger than 64 KiB.
    """
    try:
        return parse_readme(read_readme_file(folder))
    except FileNotFoundError:
        return None


def read_readme_file(folder: Path) -> bytes:
    """The content of a folder's README.

    Raises:
        FileNotFoundError: There is none.
        AdapterMismatchError: It links out of the folder, cannot be read, or is larger than 1 MiB.
    """
    try:
        return read_file(folder / CARD_NAME, _MAX_BYTES, folder)
    except RefusedFileError as error:
        raise AdapterMismatchError(str(error)) from error


def parse_readme(content: bytes) -> ModelCard:
    """A README's metadata and text."""
    text = re.sub("\r\n?", "\n", content.decode("utf-8-sig", errors="replace"))
    metadata, text = _parted(text)
    if len(metadata) > _MAX_METADATA:
        raise AdapterMismatchError(f"{CARD_NAME}: its metadata is larger than {_MAX_METADATA:,} characters")
    try:
        found = yaml.safe_load(metadata) or {}
        card = card_of(ModelCardData(**found, ignore_metadata_errors=True), text)
        str(card).encode()
    except Exception:  # whatever a stranger's metadata makes the parsers do
        card = card_of(ModelCardData(), text)
    return card


def card_of(data: ModelCardData, text: str) -> ModelCard:
    """A card of metadata and text; `ModelCard` itself would search the text for metadata again."""
    card = ModelCard("---\n{}\n---\n")
    card.data, card.text = data, text
    return card


def _parted(text: str) -> tuple[str, str]:
    """The YAML at the top, and what follows it."""
    first = _RULE.search(text)
    if first is None or text[: first.start()].strip():
        return "{}", text
    last = _RULE.search(text, first.end())
    if last is None:
        return "{}", text
    return text[first.end() : last.start()], text[last.end() + 1 :]


def shows_results(folder: Path) -> bool:
    """Whether the card in `folder` shows something that was measured."""
    try:
        return MEASURED.encode() in read_readme_file(folder)
    except (FileNotFoundError, AdapterMismatchError):
        return False


def merge(old: ModelCard, new: ModelCard, repo_id: str | None) -> tuple[ModelCard, bool]:
    """`old` with the generated part and the metadata of `new`, and whether the results of the old one stay.

    What somebody wrote stays.
    """
    stays = False
    ours = generated_part(new.text)
    assert ours is not None
    part, digest = new.text[ours[0]], ours[1]
    before = generated_part(old.text)
    metadata, known = new.data.to_dict(), old.data.to_dict()
    if before is not None:
        there = old.text[before[0]]
        if before[1] == digest and MEASURED in there and MEASURED not in part:
            part, stays = there, True
            if repo_id is not None:
                part = part.replace(f"adapter = {literal(PLACEHOLDER)}", f"adapter = {literal(repo_id)}")
        else:
            known.pop("model-index", None)
        text = old.text[: before[0].start] + part + old.text[before[0].stop :]
    elif _is_template(old.text):
        text = new.text
    else:
        text = f"{old.text.rstrip()}\n\n{part}\n"
    theirs = known.get("tags")
    tags = dict.fromkeys([*(metadata.get("tags") or ()), *(map(str, theirs) if isinstance(theirs, list) else ())])
    if hub_id(known.get("base_model")) is None:  # PEFT puts the path of a folder there
        known.pop("base_model", None)
    kept = {str(name): value for name, value in known.items()}
    merged = {**metadata, **kept, **{n: metadata[n] for n in _set_here(metadata)}, "tags": list(tags)}
    return card_of(ModelCardData(**merged, ignore_metadata_errors=True), text), stays


def generated_part(text: str) -> tuple[slice, str] | None:
    """Where the generated part of a card is, its two comments included, and the digest that it names."""
    begin = _BEGIN.search(text)
    end = -1 if begin is None else text.find(END, begin.end())
    return None if begin is None or end < 0 else (slice(begin.start(), end + len(END)), begin[1])


def _set_here(metadata: Mapping[str, Any]) -> list[str]:
    """What a card of ours says, whatever stood there."""
    names = ("base_model", "base_model_relation", "library_name", "pipeline_tag", "license", "language", "datasets")
    return [name for name in (*names, "model-index") if metadata.get(name) is not None]


def _is_template(text: str) -> bool:
    """Whether nobody has written into the empty card that PEFT saves."""
    empty = ModelCard.from_template(ModelCardData()).text.split()
    found = text.split("### Framework versions")[0].split()
    return not found or found == empty
