"""`prefill-node`: the prefill tier's daemon."""

from __future__ import annotations

import sys

from node_runtime.fork_server import start_early


def main() -> None:
    """Run the `prefill-node` script."""
    start_early(sys.argv[1:])
    from prefill_node.command import app

    app()


if __name__ == "__main__":
    main()
