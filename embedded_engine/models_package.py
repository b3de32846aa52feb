"""Replace `transformers.models` by a package without its table of names, in a node's fork server and before any model.

On import, that package reads its 2,000 files to build a table of class names. `import transformers` has just built the same
table. Only `from transformers.models import NAME` uses the second table, and neither transformers nor this project does that.
Submodules are imported as usual. Reading the files takes 0.2 s of a node's start. Other processes keep the original package.
"""

import importlib.util
import sys

_NAME = "transformers.models"

if _NAME not in sys.modules and (spec := importlib.util.find_spec(_NAME)) is not None:  # find_spec imports transformers
    sys.modules[_NAME] = importlib.util.module_from_spec(spec)
