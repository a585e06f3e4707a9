"""Why something could not be fetched from the Hugging Face Hub, in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from .shown import OneLine

# Of users hf_..., of organisations api_org_..., and what the Hub signs: hf_oauth_eyJ... and
# hf_jwt_eyJ..., with dots.
_TOKEN = re.compile(
    r"(?:(?<=hf_oauth_)|(?<=hf_jwt_))[\w.-]{16,}|(?:(?<=hf_)|(?<=api_org_))[A-Za-z0-9]{16,}",
    re.ASCII,
)
_DATASET = re.compile(
    r"(?:Couldn't reach|Dataset) '?([\w-][\w.-]{0,95}(?:/[\w.-]{1,96})?)'? ", re.ASCII
)


class HubError(OneLine, RuntimeError):
    """A model, adapter or dataset is neither a local path nor available on the Hub."""


def explain(error: BaseException, what: str | None = None, access: str = "read") -> HubError | None:
    """A `HubError` that says what to do, or None when `error` has nothing to do with the Hub.

    transformers, peft and datasets each wrap the Hub client's exceptions in their own, with
    messages that blame something else ("Can't find adapter_config.json"); the chain of causes still
    holds the original. Messages are written here and never copied from it, so no header, and no
    token, can get into them. `what` was asked for, such as `"model me/tiny"`; by default it is the
    dataset that the error is about. `access` is `"write"` for what is sent to the Hub.
    """
    for cause in causes(error):
        said = _said(cause, access)
        if said is not None:
            return HubError(f"{what or _dataset_in(error) or 'download'}: {said}")
    return None


def _dataset_in(error: BaseException) -> str | None:
    """`"dataset me/texts"`, where `datasets` said so: no option names those of lm-eval."""
    for cause in causes(error):
        if found := _DATASET.match(str(cause)):
            return f"dataset {found[1]}"
    return None


def _said(cause: BaseException, access: str) -> str | None:
    from huggingface_hub import errors

    if isinstance(cause, errors.HFValidationError) and access == "write":
        return "no name of a repository; write user/name, of letters, digits, '-', '_' and '.'"
    if isinstance(cause, errors.OfflineModeIsEnabled) and access == "write":
        return "HF_HUB_OFFLINE is set; unset it to send something"
    unfetched = "not a local path and not in the local cache, and"
    nowhere = isinstance(cause, errors.LocalEntryNotFoundError | ConnectionError)
    if isinstance(cause, errors.OfflineModeIsEnabled) or (nowhere and offline()):
        return f"{unfetched} HF_HUB_OFFLINE is set; unset it to download, or give a local path"
    if isinstance(cause, errors.GatedRepoError):
        return "gated on the Hub; accept its terms on its page there, then run `hf auth login`"
    if isinstance(cause, errors.RevisionNotFoundError):
        return "the Hub has no such revision"
    if isinstance(cause, errors.HfHubHTTPError):
        status = getattr(cause.response, "status_code", None)
        if status in (401, 403):
            return _refused(access, status)
        if isinstance(cause, errors.RepositoryNotFoundError):
            return "neither a local path nor on the Hub (404); check the spelling"
        if not isinstance(cause, errors.RemoteEntryNotFoundError):
            return f"the Hub answered with HTTP status {status}; try again later"
    # The HTTP client's own error, which `huggingface_hub` passes on where it has no cache to look
    # in.
    if any(base.__name__ == "TransportError" for base in type(cause).__mro__):
        said = "the Hub cannot be reached; check the network"
        if access == "write":
            return said
        return f"{said}, or set HF_HUB_OFFLINE=1 to use what has been downloaded"
    if nowhere:
        return f"{unfetched} the Hub cannot be reached; check the network, or give a local path"
    return None


@contextmanager
def explained(what: str, access: str = "read") -> Iterator[None]:
    """Raise the Hub client's errors in the block as `HubError`; arguments of `explain`."""
    try:
        yield
    except Exception as error:
        found = explain(error, what, access)
        if found is None:
            raise
        raise found from error


def without_tokens(text: str) -> str:
    """`text` with Hub tokens blotted out: a server may repeat what it was sent."""
    return _TOKEN.sub("***", text)


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, then what it was raised from or during, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def offline() -> bool:
    """Whether HF_HUB_OFFLINE was set when the Hub client was imported."""
    from huggingface_hub import constants

    of_datasets = os.environ.get("HF_DATASETS_OFFLINE", "").upper()
    return bool(constants.HF_HUB_OFFLINE) or of_datasets in ("1", "TRUE", "YES")


def _refused(access: str, status: int) -> str:
    from huggingface_hub import get_token

    if get_token() is not None:
        remedy = f"check that it is valid and may {access} this repository, or run `hf auth login`"
        return f"the Hub refused the token ({status}); {remedy}"
    # Without a token the Hub answers 401 for what is private and for what does not exist alike.
    said = "the Hub refused access (no token): it is private or does not exist"
    if access == "write":
        said = "the Hub takes nothing without a token"
    return f"{said}; run `hf auth login` or set HF_TOKEN"
