"""Kernels of a decode step on a GPU: attention over the paged pool, and the write of a step's new rows into it.

Triton is imported by `paged_decode` and `write_rows` alone; `reference` says in plain torch, on any device, what they compute.
"""
