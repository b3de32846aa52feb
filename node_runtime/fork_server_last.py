"""Enable garbage collection for the ranks, except for objects of the fork server, which imports this module last.

No collection precedes `gc.freeze`. A collection would leave free memory between the objects. A rank that allocates there copies
the page. Source: documentation of `gc.freeze`.
"""

import gc

gc.freeze()
gc.enable()
