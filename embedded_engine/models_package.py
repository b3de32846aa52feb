"""Imported by a node's fork server before any model: `transformers.models` without its table of names.

When it is imported, that package reads its 2,000 files to learn which class is in which. `import transformers` has read them for
the same table just before. The second table is only for `from transformers.models import NAME`, which neither transformers nor
this project does; submodules are imported as ever. It takes 0.2 s of a node's start. Other processes keep the package as it is.
"""

import importlib.util
import sys

_NAME = "transformers.models"

if _NAME not in sys.modules and (spec := importlib.util.find_spec(_NAME)) is not None:  # which imports transformers itself
    sys.modules[_NAME] = importlib.util.module_from_spec(spec)
