"""Imported first by a node's fork server: no garbage collection while it imports.

A collection in the midst of imports looks at every object that lives, and finds next to nothing. They take a quarter of the time
that torch and transformers need to be imported (0.8 of 3.5 s on two cores of an EPYC).
"""

import gc
import signal

gc.disable()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the leader, also while this process imports
