"""Parse one costly body, in a process that `kvferry.router.body_reader` starts.

Job and body arrive on standard input, and the answer goes to standard output.
"""

from __future__ import annotations

import pickle
import signal
import sys

from kvferry.router.api import ApiError
from kvferry.router.openai_body import parse_body


def main() -> None:
    """Write the result of the job for the body, or the ApiError that refuses the body."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the router drains then, and needs the answer
        signal.signal(number, signal.SIG_IGN)
    make, args = pickle.load(sys.stdin.buffer)
    try:
        answer = make(*args, parse_body(sys.stdin.buffer.read()))
    except ApiError as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
