"""Run the fork server of a local cluster: ``python -m node_runtime.shared_fork_server LISTENER ALIVE MODULE...``.

It forks the ranks of all nodes, so their modules are imported once. See docs/adr/0064-one-fork-server-for-a-local-cluster.md.

LISTENER is the descriptor of a listening socket. ALIVE is the read end of a pipe whose end of file ends the fork server.
"""

from __future__ import annotations

import multiprocessing.forkserver
import signal
import sys

from node_runtime.process_setup import import_before_forks, prepare_process


def main() -> None:
    """Import the modules and serve."""
    listener, alive, *modules = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # only leaders react to it; each rank inherits the mask
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare_process()
    import_before_forks(modules)
    multiprocessing.forkserver.main(int(listener), int(alive), [])


if __name__ == "__main__":
    main()
