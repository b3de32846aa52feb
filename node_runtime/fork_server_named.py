"""Imported by a fork server that was started before the settings were known: waits for the names of modules, and imports them."""

import contextlib
import importlib
import os
from pathlib import Path

from node_runtime.fork_server import MODULES_AT

with contextlib.suppress(
    OSError
):  # the leader has ended, and this process ends, too; or it hides its files, and ranks import all
    for name in Path(os.environ.pop(MODULES_AT)).read_text(encoding="utf-8").split():
        with contextlib.suppress(ImportError):  # the ranks report it
            importlib.import_module(name)
