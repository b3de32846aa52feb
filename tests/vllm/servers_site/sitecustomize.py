"""Loaded by every Python process of a vLLM server of these tests, because this folder is on its PYTHONPATH.

vLLM's processes wait for one another in loops around `os.sched_yield()`, for a second after each message. With fewer cores than
processes that wait, Linux 6.18 (6.18.44 without kernel preemption, two cores) then runs these loops and nothing else: other
processes that were ready to run got no time at all for up to 101 s, measured by one that sleeps 20 ms at a time, and each link
to them was taken for dead. A loop that sleeps between two looks makes way.
"""

import os
import time

LOOK_EVERY_S = 0.0001


def sched_yield() -> None:
    time.sleep(LOOK_EVERY_S)


os.sched_yield = sched_yield
