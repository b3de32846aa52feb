"""What takes a fork server long to import, as torch does."""

import time

from tests.runtime.preloaded import rank_entries

time.sleep(rank_entries.SLOW_IMPORT_S)
