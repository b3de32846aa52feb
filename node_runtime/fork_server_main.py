"""Import the modules that the ranks of a node need, in the fork server, which imports this module only.

The leader writes the names of the modules to a pipe, and closes it after the last one.
"""

import contextlib
import os
import signal

from node_runtime.fork_server import MODULES_AT
from node_runtime.process_setup import import_before_forks

signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the leader reacts to Ctrl-C of a terminal
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
# OSError: the leader has ended, and then this process ends too. Or its files are not readable, or a fork server ended between two
# ranks and the standard library started this one, without the variable. Then the ranks import all modules themselves.
with contextlib.suppress(OSError), open(os.environ.pop(MODULES_AT, ""), encoding="utf-8") as names:
    import_before_forks(name.strip() for name in names)
