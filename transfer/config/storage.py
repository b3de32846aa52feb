"""Sections for KV outside the device pools: host memory of a decode rank, and the store that nodes share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from transfer.config.operation import BreakerConfig
from transfer.config.values import Count, CountOrZero, Seconds, Section, SizeBytes, no_bool

Share = Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1)]


class HostSizeConfig(Section):
    """Size of the host memory of each rank for KV."""

    host_ratio: Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1024)] | None = Field(
        default=None,
        description="Host memory for KV of each rank, as a multiple of its device pool; null: see offload.host_memory.",
    )
    host_memory: SizeBytes | None = Field(
        default=None,
        description="Host memory for KV of each rank, in bytes, instead of offload.host_ratio. Both null: no host memory for KV.",
    )

    @property
    def is_on(self) -> bool:
        """Whether there is host memory for KV."""
        return self.host_ratio is not None or self.host_memory is not None

    @model_validator(mode="after")
    def _check_one_size(self) -> Self:
        if self.host_ratio is not None and self.host_memory is not None:
            raise ValueError(f"host_ratio is {self.host_ratio} and host_memory is {self.host_memory}; set one of them")
        return self


class HostMemoryConfig(HostSizeConfig):
    """Host memory of each rank for KV, and the buffers through which a device reads it."""

    buffer_bytes: SizeBytes = Field(
        default=64 << 20,
        description="Device memory for copies in each direction, and for blocks of host pages that attention reads.",
    )

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory of a rank for the two buffers through which attention reads host pages."""
        return 2 * self.buffer_bytes if self.is_on else 0


class OffloadConfig(HostMemoryConfig):
    """Host memory of each decode rank for KV, and early release of device pages."""

    stride_tokens: Count = Field(
        default=64,
        description="Tokens of a request per save, rounded down to whole pages; at least one page.",
    )
    device_window: CountOrZero | None = Field(
        default=None,
        description=(
            "Newest tokens of each request that stay on the device. Older ones move to host memory when the pool is short of "
            "pages. null: all stay, and a request must fit the device pool. Long prompts arrive in host memory by whole "
            "chunks, so fewer tokens can stay if the device pool has little more than one chunk."
        ),
    )
    io_backend: Literal["auto", "kernel", "copies"] = Field(
        default="auto",
        description=(
            "Copies over the host link of a GPU. kernel: a kernel reads or writes host memory. copies: one copy per run of "
            "host pages. auto: kernel if runs are shorter than 256 KiB on average."
        ),
    )
    high_water: Share = Field(
        default=0.9,
        description="Fraction of the device pool above which pages older than offload.device_window move to host memory.",
    )
    low_water: Share = Field(default=0.7, description="Fraction of the device pool below which pages are loaded back.")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.device_window is not None and not self.is_on:
            raise ValueError(
                f"device_window is {self.device_window}, which needs host memory for older tokens; set host_ratio or host_memory"
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
        """Device memory of a rank for its copies, and for the two blocks through which attention reads."""
        if not self.is_on:
            return 0
        return 2 * self.buffer_bytes + (2 * self.buffer_bytes if self.device_window is not None else 0)


ANSWER_S: Final = 0.5
"""Time after a store's deadline in which its client reports the failure."""


class StorageBreakerConfig(BreakerConfig):
    """Breakers of the store, one for reads and one for writes."""

    failures: Count = Field(
        default=3,
        description="Failures and timeouts within storage.breaker.window_s that open the circuit breaker of the store.",
    )
    window_s: Seconds = Field(default=30.0, description="Seconds after which such a failure is no longer counted.")
    pause_s: Seconds = Field(
        default=1.0,
        description="Seconds for which an open circuit breaker stops calls, before one call tests the store; doubled each time.",
    )
    max_pause_s: Seconds = Field(
        default=60.0,
        description="Maximum pause. If the store works for this long, the pause is storage.breaker.pause_s again.",
    )


class StorageConfig(Section):
    """A store of pages, in a directory or an object store."""

    directory: Path | None = Field(
        default=None,
        description="Directory of the store, created if missing. Processes that share it must run as the same user.",
    )
    url: str | None = Field(
        default=None,
        description=(
            "An object store instead: s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix. Needs the extra "
            "kvferry[s3]. Credentials and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...)."
        ),
    )
    max_bytes: SizeBytes | None = Field(
        default=None,
        description=(
            "Maximum size of storage.directory, for all nodes together. The least recently used pages are evicted. null: no "
            "limit. For storage.url, use lifecycle rules of the bucket."
        ),
    )
    salt: Annotated[str, Field(max_length=128)] = Field(
        default="",
        description="Nodes share stored pages only with nodes of the same salt. A request may add a salt.",
    )
    put_timeout_s: Seconds = Field(default=30.0, description="Timeout of a write to the store.")
    get_timeout_s: Seconds = Field(
        default=2.0,
        description=(
            "Maximum wait of a request for one lookup in the store, including the loaded pages. Pages that arrive later are "
            "computed. An attempt has up to three lookups: decode node, prefill node, and prefill ranks."
        ),
    )
    queue_bytes: SizeBytes = Field(
        default=256 << 20,
        description="Maximum bytes of a process that wait for reads, and likewise for writes. Further pages are skipped.",
    )
    threads: Count = Field(
        default=4,
        description="Threads of a process that read from the store. The same number writes to it, and one more thread deletes.",
    )
    breaker: StorageBreakerConfig = Field(default_factory=StorageBreakerConfig, description="Circuit breakers of the store.")

    @property
    def is_set(self) -> bool:
        """Whether there is a store."""
        return self.directory is not None or self.url is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.directory is not None and self.url is not None:
            raise ValueError(f"directory is {self.directory} and url is set, too; set one of them")
        if self.max_bytes is not None and self.directory is None:
            raise ValueError(f"max_bytes is {self.max_bytes}; it is only for a store in storage.directory")
        return self
