"""A module whose import takes long, as torch's does: until a test removes the file that the import creates."""

import os
import time
from pathlib import Path

from tests.runtime.preloaded import rank_entries

LONGEST_S = 20.0  # for a leader that waits for this import, and so removes nothing

_importing = Path(os.environ[rank_entries.IMPORTING])
_importing.touch()
_ends_s = time.monotonic() + LONGEST_S
while _importing.exists() and time.monotonic() < _ends_s:
    time.sleep(0.005)
