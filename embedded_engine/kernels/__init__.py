"""Kernels of a decode step on a GPU: attention over the paged pool, and the write of new rows into it.

`reference` defines the results in plain torch, on any device, without Triton.
"""
