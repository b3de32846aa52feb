"""A leader that starts its fork server as a node does: ``python -m tests.runtime.early_leader MODEL``.

It prints the environment, the modules with their types, and the blocked signals of a process that is forked from it.
"""

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path


def report() -> None:
    modules = {name: type(module).__name__ for name, module in sys.modules.items()}
    blocked = [signal.Signals(number).name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    print(json.dumps({"modules": modules, "environment": dict(os.environ), "blocked": blocked}), flush=True)


def main(model: Path) -> None:
    from node_runtime.fork_server import start_early

    start_early(["serve"])
    from node_runtime.fork_server import start_fork_server
    from node_runtime.node_role import preloaded_modules
    from tests.runtime.instances import decode_config

    start_fork_server(preloaded_modules(decode_config(model)))
    process = multiprocessing.get_context("forkserver").Process(target=report)
    process.start()
    process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
