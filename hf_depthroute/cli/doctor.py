"""`hf-depthroute doctor`: is this adapter whole, and what is it?"""

from __future__ import annotations

from pathlib import Path

from ..files.shown import say
from . import options as o
from .errors import ADAPTER, CliError
from .output import restore_hidden


def doctor(adapter: o.Adapter = "", adapter_option: o.OldAdapter = None, debug: o.Debug = False) -> None:
    """Check an adapter's files without loading them into a model.

    Ends with exit code 0 when they can be loaded onto their base, and with 4 at the first fault.

    \b
    Example:
      hf-depthroute doctor routed
    """
    from . import loading

    loading.quiet(debug)
    from ..adapter.doctor import examine
    from ..adapter.files import CONFIG_NAME, WEIGHTS_NAME
    from ..adapter.saving import settle

    folder = Path(adapter)
    restore_hidden(folder)
    if folder.is_dir():
        settle(folder)  # a save that was killed, as loading does
    folder = loading.folder_of("adapter", adapter, [CONFIG_NAME, WEIGHTS_NAME], ADAPTER)
    fault = None
    for finding in examine(folder):
        say(f"{finding.state:5}  {finding.text}")
        fault = finding.text if finding.state == "fault" else fault
    if fault is not None:
        raise CliError(f"adapter {adapter}: {fault}", ADAPTER)
