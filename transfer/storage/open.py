"""From the settings to a store."""

from __future__ import annotations

import asyncio

from transfer.config import StorageConfig
from transfer.storage.base import Store, StoreObserver
from transfer.storage.client import StoreClient, StoreClientSettings
from transfer.storage.directory import DirectoryStore, check_directory
from transfer.storage.object_store import ObjectStore


def check_store(config: StorageConfig) -> None:
    """Whether the store could be opened, without looking at what is in it.

    Raises:
        ConfigError: As `open_store`.
    """
    if config.directory is not None:
        check_directory(config.directory)
    elif config.url is not None:
        open_store(config)


def open_store(config: StorageConfig) -> Store | None:
    """The store that is configured; None where there is none. Looks at no page.

    Raises:
        ConfigError: It cannot be used; the setting is named.
    """
    if config.directory is not None:
        return DirectoryStore(config.directory, max_bytes=config.max_bytes)
    if config.url is not None:
        return ObjectStore(config.url, timeout_s=max(config.put_timeout_s, config.get_timeout_s))
    return None


def open_store_client(config: StorageConfig, *, loop: asyncio.AbstractEventLoop, observer: StoreObserver) -> StoreClient | None:
    """`open_store`, beside a loop. One client serves every fingerprint: each key says which it is of.

    Raises:
        ConfigError: As `open_store`.
    """
    store = open_store(config)
    if store is None:
        return None
    settings = StoreClientSettings(
        put_timeout_s=config.put_timeout_s,
        get_timeout_s=config.get_timeout_s,
        queue_bytes=config.queue_bytes,
        threads=config.threads,
        breaker=config.breaker.settings(),
    )
    return StoreClient(store, loop=loop, settings=settings, observer=observer)
