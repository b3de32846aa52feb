"""Imported last by a node's fork server: ranks collect garbage again, but never look at what they share with it.

Not preceded by a collection: that would leave free memory between the objects, and a rank that allocates there copies the page.
Source: documentation of `gc.freeze`.
"""

import gc

gc.freeze()
gc.enable()
