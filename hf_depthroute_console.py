"""The program `hf-depthroute`: `hf_depthroute.cli`,
with torch and PEFT loaded by the commands that need them.

`import hf_depthroute` loads both, because it registers the method with PEFT. Where this module is
loaded before it, it leaves that to the commands (`hf_depthroute.cli.loading`), so that `--help` and
a wrong option answer at once. A hook that waits for `import peft` would do the same for every
program, but it runs in the middle of whatever imports PEFT, which may be half of a module that it
needs, or another thread.
"""

from hf_depthroute.cli import main

__all__ = ["main"]
