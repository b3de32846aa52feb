"""Every setting of the two daemons, declared once: a YAML file, the environment, flags.

A setting is named by its path, for example ``pool.page_size``. Its value comes from the strongest source that has it:

1. flags (``--set pool.page_size=32``, or a named flag of the daemon),
2. the environment (``KVFERRY_POOL__PAGE_SIZE=32``: the path in capitals, ``__`` for each dot),
3. the YAML file,
4. the default.

A name that is no setting is refused in every source; only what Kubernetes sets for a Service is ignored. All that is wrong is
told at once, one line each: path, value, where it came from, what would be right.
``python -m transfer.config`` prints docs/configuration.md.
"""

from transfer.config.connector import ConnectorConfig, ConnectorLimitsConfig
from transfer.config.memory import (
    CPU_POOL_PAGES,
    ChunkConfig,
    MemoryConfig,
    ParallelConfig,
    PoolConfig,
    RingConfig,
    StagingConfig,
)
from transfer.config.network import (
    CudaIpcConfig,
    DiscoveryConfig,
    NixlConfig,
    PeersConfig,
    ServerConfig,
    TlsConfig,
    TransportConfig,
    UcxConfig,
)
from transfer.config.nodes import ClientConfig, DecodeNodeConfig, NodeConfig, PrefillNodeConfig, ProcessConfig
from transfer.config.operation import (
    MAX_HEARTBEAT_S,
    MIN_HEARTBEAT_S,
    BreakerConfig,
    DecodeLimitsConfig,
    HeartbeatConfig,
    LimitsConfig,
    LogConfig,
    PlacementConfig,
    PrefillLimitsConfig,
    RestartConfig,
    TracingConfig,
)
from transfer.config.storage import StorageBreakerConfig, StorageConfig
from transfer.config.values import (
    EMBEDDED_ENGINE,
    ENVIRONMENT_PREFIX,
    Count,
    CountOrZero,
    EngineName,
    Host,
    HostPort,
    PeerName,
    Port,
    Seconds,
    SizeBytes,
    parse_size,
    section_type,
    settings,
)

__all__ = [
    "CPU_POOL_PAGES",
    "EMBEDDED_ENGINE",
    "ENVIRONMENT_PREFIX",
    "MAX_HEARTBEAT_S",
    "MIN_HEARTBEAT_S",
    "BreakerConfig",
    "ChunkConfig",
    "ClientConfig",
    "ConnectorConfig",
    "ConnectorLimitsConfig",
    "Count",
    "CountOrZero",
    "CudaIpcConfig",
    "DecodeLimitsConfig",
    "DecodeNodeConfig",
    "DiscoveryConfig",
    "EngineName",
    "HeartbeatConfig",
    "Host",
    "HostPort",
    "LimitsConfig",
    "LogConfig",
    "MemoryConfig",
    "NixlConfig",
    "NodeConfig",
    "ParallelConfig",
    "PeerName",
    "PeersConfig",
    "PlacementConfig",
    "PoolConfig",
    "Port",
    "PrefillLimitsConfig",
    "PrefillNodeConfig",
    "ProcessConfig",
    "RestartConfig",
    "RingConfig",
    "Seconds",
    "ServerConfig",
    "SizeBytes",
    "StagingConfig",
    "StorageBreakerConfig",
    "StorageConfig",
    "TlsConfig",
    "TracingConfig",
    "TransportConfig",
    "UcxConfig",
    "parse_size",
    "section_type",
    "settings",
]
