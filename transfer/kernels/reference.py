"""Gather and scatter by plain torch indexing: slow, obviously right, and the definition of correct for every other one."""

from __future__ import annotations

import torch
from torch import Tensor

from transfer.kernels.copier import CopyJob, HeadSliceCopier
from transfer.kv_pool import as_words, convert
from transfer.layout import WireBuffer


class ReferenceCopier(HeadSliceCopier):
    """Works on every device; what the tests compare the others with."""

    def _gather(self, job: CopyJob) -> None:
        for buffer in job.buffers:
            page, offset = self._places(job, buffer)
            found = as_words(self._view(buffer))[page, offset].view(self.pool.dtype)
            self._wire(job, buffer).copy_(convert(found, self.wire_dtype))

    def _scatter(self, job: CopyJob) -> None:
        for buffer in job.buffers:
            page, offset = self._places(job, buffer)
            values = convert(self._wire(job, buffer), self.pool.element)
            as_words(self._view(buffer))[page, offset] = as_words(values)

    def _places(self, job: CopyJob, buffer: WireBuffer) -> tuple[Tensor, Tensor]:
        """Page and offset of each token of the buffer, int64 [tokens] each."""
        slots = job.slots(buffer)
        slot = torch.arange(slots.begin, slots.end, device=self.pool.device)
        return job.pages[slot // self.pool.page_size], slot % self.pool.page_size
