"""Wait for module names and import these modules, in a fork server that was started before the settings were known."""

import contextlib
import importlib
import os
from pathlib import Path

from node_runtime.fork_server import MODULES_AT

# OSError: the leader has ended, and then this process ends too. Or the leader's files are not readable, and then the ranks import
# all modules themselves.
with contextlib.suppress(OSError):
    for name in Path(os.environ.pop(MODULES_AT)).read_text(encoding="utf-8").split():
        with contextlib.suppress(ImportError):  # the ranks report the error
            importlib.import_module(name)
