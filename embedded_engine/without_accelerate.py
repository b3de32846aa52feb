"""Make accelerate appear as not installed, in the fork server of a node with one rank.

transformers needs accelerate only to load the shards of a model on several ranks, but imports it whenever it is installed. The
import takes 0.1 s of a node's start. Python treats None in `sys.modules` as a module that cannot be imported.
"""

import sys

sys.modules.setdefault("accelerate", None)  # type: ignore[arg-type]
