"""Import the modules that the ranks of a node need, in the fork server, which imports this module only.

The leader writes the names of the modules to a pipe, and closes it after the last one.
"""

import contextlib
import gc
import importlib
import os
import signal

from node_runtime.fork_server import MODULES_AT

# A collection during imports examines every object and frees almost none. Collections take a quarter of the import time of torch
# and transformers (0.8 of 3.5 s on two cores of an EPYC).
gc.disable()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the leader reacts to Ctrl-C of a terminal
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
# OSError: the leader has ended, and then this process ends too. Or its files are not readable, or a fork server ended between two
# ranks and the standard library started this one, without the variable. Then the ranks import all modules themselves.
with contextlib.suppress(OSError), open(os.environ.pop(MODULES_AT, ""), encoding="utf-8") as names:
    for name in names:
        with contextlib.suppress(ImportError):  # the ranks report the error
            importlib.import_module(name.strip())
# No collection precedes `gc.freeze`. It would leave free memory between the objects, and a rank that allocates there copies the
# page. Source: documentation of `gc.freeze`.
gc.freeze()
gc.enable()
