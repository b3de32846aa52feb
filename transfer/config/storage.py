"""Section of the store that nodes of both tiers share: where pages of KV outlive the pools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from transfer.breaker import BreakerSettings
from transfer.config.values import Count, Seconds, Section, SizeBytes

ANSWER_S: Final = 0.5
"""By which what a store has been asked is waited for beyond its own deadline: its failure is the client's to note."""


class StorageBreakerConfig(Section):
    """When the store is left alone for a while; reading and writing have a breaker each."""

    failures: Count = Field(
        default=3,
        description="Calls that fail or run out of time, within storage.breaker.window_s, before it is left alone.",
    )
    window_s: Seconds = Field(default=30.0, description="Seconds after which such a failure counts no more.")
    pause_s: Seconds = Field(
        default=1.0,
        description="Seconds for which it is left alone before one call tries it; doubled at each further time.",
    )
    max_pause_s: Seconds = Field(
        default=60.0,
        description="Longest such pause; one that has served for so long begins with storage.breaker.pause_s again.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_pause_s < self.pause_s:
            raise ValueError(f"max_pause_s is {self.max_pause_s}; it must be at least pause_s, {self.pause_s}")
        return self

    def settings(self) -> BreakerSettings:
        """Return these settings as `BreakerSettings`."""
        return BreakerSettings(**dict(self))


class StorageConfig(Section):
    """A store of pages, in a directory or an object store; none without either."""

    directory: Path | None = Field(
        default=None,
        description="Folder of the store, the same for all nodes that share it, of one user; made where it is not there.",
    )
    url: str | None = Field(
        default=None,
        description=(
            "An object store instead: s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix. Needs the extra "
            "kvferry[s3]; who calls and where is taken from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...)."
        ),
    )
    max_bytes: SizeBytes | None = Field(
        default=None,
        description=(
            "Most bytes of storage.directory, over all nodes; the pages least recently used make room. null: as many as the disk "
            "takes. The rules of a bucket are its own."
        ),
    )
    salt: Annotated[str, Field(max_length=128)] = Field(
        default="", description="Nodes share stored pages only with nodes of the same salt. A request may have one on top."
    )
    put_timeout_s: Seconds = Field(default=30.0, description="Longest that a page may take into the store before it is given up.")
    get_timeout_s: Seconds = Field(
        default=2.0,
        description=(
            "Longest that one look into the store, with what it brings, keeps a request waiting; what has not come is computed. "
            "Up to three follow one another at each try of a request: the decode node's, the prefill node's, and that of its "
            "ranks, which load."
        ),
    )
    queue_bytes: SizeBytes = Field(
        default=256 << 20,
        description="Most pages of a process that wait to be read, and as many to be written; more are not.",
    )
    threads: Count = Field(
        default=4,
        description="Calls of the store at once by which a process reads, and as many by which it writes; one more deletes.",
    )
    breaker: StorageBreakerConfig = Field(default_factory=StorageBreakerConfig, description="When the store is left alone.")

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
