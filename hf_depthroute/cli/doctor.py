"""`hf-depthroute doctor`: is this adapter whole, and what is it?"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

from ..files.shown import say
from . import options as o
from .errors import ADAPTER, CliError

_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")


def doctor(
    adapter: o.Adapter = "", adapter_option: o.OldAdapter = None, debug: o.Debug = False
) -> None:
    """Check an adapter's files without loading them into a model.

    Ends with exit code 0 when they can be loaded onto their base, and with 4 at the first fault.

    \b
    Example:
      hf-depthroute doctor routed
    """
    folder = Path(adapter)
    if not folder.is_dir():
        folder = _downloaded(adapter, debug)
    if not debug:
        warnings.simplefilter("ignore")
    from ..adapter.doctor import examine
    from ..adapter.source import settle

    settle(folder)  # a save that was killed, as loading does
    fault = None
    for finding in examine(folder):
        say(f"{finding.state:5}  {finding.text}")
        if finding.state == "fault":
            fault = finding.text
    if fault is not None:
        raise CliError(f"adapter {adapter}: {fault}", ADAPTER)


def _downloaded(adapter: str, debug: bool) -> Path:
    """The folder of an adapter on the Hub, downloaded; no other name is asked for there."""
    if Path(adapter).exists():
        raise CliError(f"adapter {adapter}: is a file; name the folder that it is in")
    if not _HUB_ID.fullmatch(adapter):
        raise CliError(f"adapter {adapter}: no such folder, and not a Hub id (user/name)")
    from . import loading

    loading.quiet(debug)
    return loading.folder_of("adapter", adapter, loading.ADAPTER_FILES, ADAPTER)
