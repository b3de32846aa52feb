"""Section of what a decode node keeps outside of its devices, see docs/offload.md."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from transfer.config.values import Count, CountOrZero, Section, SizeBytes, no_bool

Share = Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1)]


class OffloadConfig(Section):
    """Host memory of each decode rank for KV, and what leaves the device early."""

    host_ratio: Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1024)] | None = Field(
        default=None,
        description="Host memory for KV of each rank, as so many times its device pool; null: see offload.host_memory.",
    )
    host_memory: SizeBytes | None = Field(
        default=None,
        description="Host memory for KV of each rank, in bytes; instead of offload.host_ratio. Both null: none.",
    )
    stride_tokens: Count = Field(
        default=64,
        description="Tokens of a request that are saved into host memory at a time, rounded down to whole pages; at least one.",
    )
    device_window: CountOrZero | None = Field(
        default=None,
        description=(
            "Newest tokens of each request that stay on the device. Older ones leave it when the pool is short of pages, and are "
            "read where they lie. null: all stay, and a request must fit the device pool. A long prompt arrives in host memory "
            "by whole chunks, so a device pool with room for little more than one chunk may keep fewer of its tokens."
        ),
    )
    high_water: Share = Field(
        default=0.9, description="Part of the device pool above which requests give up what is older than offload.device_window."
    )
    low_water: Share = Field(default=0.7, description="Part of the device pool below which pages are brought back.")
    buffer_bytes: SizeBytes = Field(
        default=64 << 20,
        description="Device memory for copies in each direction, and for blocks of host pages that attention reads.",
    )

    @property
    def is_on(self) -> bool:
        """Whether there is host memory for KV."""
        return self.host_ratio is not None or self.host_memory is not None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.host_ratio is not None and self.host_memory is not None:
            raise ValueError(f"host_ratio is {self.host_ratio} and host_memory is {self.host_memory}; set one of them")
        if self.device_window is not None and not self.is_on:
            raise ValueError(
                f"device_window is {self.device_window}, and there is no host memory to move older tokens to; "
                "set host_ratio or host_memory"
            )
        if self.low_water > self.high_water:
            raise ValueError(f"low_water is {self.low_water}; it must not be above high_water, {self.high_water}")
        return self

    def stride_pages(self, page_size: int) -> int:
        """Pages of a stride."""
        return max(1, self.stride_tokens // page_size)

    def window_slack_tokens(self, page_size: int) -> int:
        """Tokens of a sliding window for which pages are set aside while a save still reads what the window has passed."""
        return 2 * self.stride_pages(page_size) * page_size if self.is_on else 0

    @property
    def device_bytes(self) -> int:
        """What a rank's copies take of its device, and the two blocks that attention reads through."""
        if not self.is_on:
            return 0
        return 2 * self.buffer_bytes + (2 * self.buffer_bytes if self.device_window is not None else 0)
