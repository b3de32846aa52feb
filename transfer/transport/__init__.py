"""The data plane: transports that move bytes, the loop that drives them, and the probe that measures them.

Nothing is imported here, so that one transport's libraries are not needed to use another.
"""
