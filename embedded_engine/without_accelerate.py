"""Imported by the fork server of a node of one rank: accelerate counts as not installed.

transformers needs it to load a model that is cut over ranks, but imports it wherever it is installed. That takes 0.1 s of a
node's start. None in `sys.modules` is Python's sign for a module that cannot be imported.
"""

import sys

sys.modules.setdefault("accelerate", None)  # type: ignore[arg-type]
