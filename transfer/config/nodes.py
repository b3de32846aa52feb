"""All settings of a process: a daemon, an engine that loads kvferry, or a command that calls a node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from transfer.config.memory import (
    CPU_POOL_PAGES,
    ChunkConfig,
    MemoryConfig,
    ParallelConfig,
    PoolConfig,
    PrefillConfig,
    RingConfig,
    StagingConfig,
)
from transfer.config.network import (
    DiscoveryConfig,
    LeaderConfig,
    NodeServerConfig,
    PeersConfig,
    ServerConfig,
    TlsConfig,
    TransportConfig,
)
from transfer.config.operation import (
    BreakerConfig,
    DecodeLimitsConfig,
    DraftModelConfig,
    GroupPlacementConfig,
    HeartbeatConfig,
    LimitsConfig,
    LogConfig,
    PlacementConfig,
    PrefillLimitsConfig,
    RestartConfig,
    SpeculativeConfig,
    StatusPageConfig,
    TracingConfig,
)
from transfer.config.storage import ANSWER_S, HostMemoryConfig, HostSizeConfig, OffloadConfig, StorageConfig
from transfer.config.values import EMBEDDED_ENGINE, MAX_PORT, Count, CountOrZero, EngineName, Seconds, Section, listed
from transfer.errors import ConfigError
from transfer.layer_groups import DECODE_STEPS_IN_FLIGHT

PREFIX_TOKENS: Final = 512
"""Default of `placement.prefix_tokens` with a store: the tokens of a prefill step by default (`limits.max_step_tokens`)."""


class RootConfig(Section):
    """All settings that `transfer.load_config` loads at once, for one role."""

    role: ClassVar[str]


class ProcessConfig(RootConfig):
    """Settings of every process, also of a command that only calls a node."""

    tls: TlsConfig = Field(default_factory=TlsConfig, description="Security of the gRPC API.")


class ClientConfig(ProcessConfig):
    """Settings of the commands that call a node."""

    role: ClassVar[str] = "client"


class InstanceConfig(ProcessConfig):
    """Settings of each instance that transfers KV: a daemon, or an engine that loads kvferry."""

    kernels: Literal["auto", "triton", "torch"] = Field(
        default="auto",
        description=(
            "Kernels on a GPU, see docs/operations.md. auto: Triton, or plain torch if Triton cannot compile at start. triton: "
            "refuse to start instead. torch: plain torch, also on cpu; slower."
        ),
    )
    transport: TransportConfig = Field(default_factory=TransportConfig, description="The data plane.")
    server: ServerConfig = Field(default_factory=ServerConfig, description="Addresses.")
    heartbeat: HeartbeatConfig = Field(default_factory=HeartbeatConfig, description="Heartbeats.")
    discovery: DiscoveryConfig = Field(default_factory=DiscoveryConfig, description="Discovery of prefill nodes.")
    status_page: StatusPageConfig = Field(default_factory=StatusPageConfig, description="The page for people.")
    log: LogConfig = Field(default_factory=LogConfig, description="The log.")
    tracing: TracingConfig = Field(default_factory=TracingConfig, description="Spans of requests.")


class NodeConfig(InstanceConfig):
    """Settings of both daemons."""

    model: Path = Field(description="Hugging Face model directory: config.json, safetensors, tokenizer.")
    engine: EngineName = Field(
        default=EMBEDDED_ENGINE,
        description="Loader of a rank's engine, as module:function; see docs/integration.md.",
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Device of the ranks; cuda: a GPU for each rank.")
    first_device: CountOrZero = Field(
        default=0, description="Index of rank 0's GPU among the visible ones. The other ranks use the GPUs that follow."
    )
    server: NodeServerConfig = Field(default_factory=NodeServerConfig, description="Addresses.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="Element type of the computation, the same on both nodes; null means that of the weights.",
    )
    dummy_weights: bool = Field(
        default=False,
        description="Random weights from config.json alone, the same for every parallel degree.",
    )
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Parallel degrees.")
    pool: PoolConfig = Field(default_factory=PoolConfig, description="The KV pool.")
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="The memory plan.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="Bounds.")
    restart: RestartConfig = Field(default_factory=RestartConfig, description="Restarts of the rank group.")
    storage: StorageConfig = Field(default_factory=StorageConfig, description="Pages of KV outside of the pools.")
    drain_timeout_s: Seconds = Field(
        default=30.0,
        description=(
            "Maximum wait for requests in flight after SIGTERM, and before a change of role. The call Drain has its own deadline."
        ),
    )
    other_role: Path | None = Field(
        default=None,
        description=(
            "YAML file of the settings that differ in the other role (SwitchRole). null: the node cannot change its role."
        ),
    )
    ready_file: Path | None = Field(
        default=None, description="JSON file with the node's addresses, written when its ranks are ready. null: none."
    )

    @property
    def draft_model(self) -> Path | None:
        """Directory of the draft model, whose KV this node also keeps; None without one."""
        return None

    @property
    def most_pages(self) -> int | None:
        """Most pages of each rank's pool; None if only the memory plan limits them."""
        return self.pool.num_pages or (CPU_POOL_PAGES if self.device == "cpu" else None)


class PrefillNodeConfig(NodeConfig):
    """Settings of ``prefill-node``."""

    role: ClassVar[str] = "prefill"

    limits: PrefillLimitsConfig = Field(default_factory=PrefillLimitsConfig, description="Bounds.")
    chunk: ChunkConfig = Field(default_factory=ChunkConfig, description="How prompts are cut.")
    prefill: PrefillConfig = Field(default_factory=PrefillConfig, description="Attention of prefill steps.")
    staging: StagingConfig = Field(default_factory=StagingConfig, description="Staging memory.")
    offload: HostMemoryConfig = Field(
        default_factory=HostMemoryConfig, description="Host memory for prompts that the device pool cannot hold."
    )
    speculative: DraftModelConfig = Field(default_factory=DraftModelConfig, description="Speculative decoding.")

    @property
    def draft_model(self) -> Path | None:
        return self.speculative.model

    @model_validator(mode="after")
    def _check_sparse_prefill_is_of_one_model(self) -> Self:
        if self.prefill.sparse_policy != "none" and self.speculative.model is not None:
            raise ValueError(
                f"prefill.sparse_policy is {self.prefill.sparse_policy}, and speculative.model is {self.speculative.model}; the "
                "workspaces of block-sparse prefill are those of one model: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_sparse_blocks(self) -> Self:
        block, page = self.prefill.sparse_block_size, self.pool.page_size
        if self.prefill.sparse_policy != "none" and block % page and page % block:
            raise ValueError(
                f"prefill.sparse_block_size is {block} and pool.page_size is {page}; one must be a multiple of the other"
            )
        return self

    @model_validator(mode="after")
    def _check_chunk_fits_pool(self) -> Self:
        if self.most_pages is None:
            return self  # sized by the memory plan
        pool_tokens = self.most_pages * self.pool.page_size
        if self.chunk.chunk_tokens > pool_tokens:
            raise ValueError(
                f"chunk.chunk_tokens is {self.chunk.chunk_tokens}; it must fit the pool's {pool_tokens} tokens "
                f"({self.most_pages} pages of {self.pool.page_size})"
            )
        return self


class DecodeNodeConfig(NodeConfig):
    """Settings of ``decode-node``."""

    role: ClassVar[str] = "decode"

    cuda_graph_max_bs: CountOrZero | None = Field(
        default=None,
        description=(
            "Largest decode batch with a CUDA graph; 0 disables graphs. null: by the device (docs/memory.md), at most "
            "limits.max_running_requests. No effect on cpu."
        ),
    )
    cuda_graph_bs: Annotated[tuple[Count, ...] | None, BeforeValidator(listed)] = Field(
        default=None,
        description=(
            "Decode batch sizes with a CUDA graph, each at most limits.max_running_requests. Not with cuda_graph_max_bs. A "
            "batch uses the smallest graph that fits, or none. Empty list: no graphs. null: 1, 2, 4 and every eighth size up "
            "to cuda_graph_max_bs. With speculative.method, each size has a graph with and one without draft tokens. No "
            "effect on cpu. In the environment: separated by commas."
        ),
    )
    torch_compile: bool = Field(
        default=False,
        description=(
            "Compile the layers of decode steps at start, which can take minutes. On cuda, only steps with a CUDA graph. If "
            "it fails, steps run uncompiled (log event torch_compile_unusable)."
        ),
    )
    torch_compile_max_bs: Count = Field(
        default=32,
        description=(
            "Largest decode batch that torch_compile compiles. With speculative.method, each draft token of a step also counts. "
            "No effect without torch_compile."
        ),
    )
    limits: DecodeLimitsConfig = Field(default_factory=DecodeLimitsConfig, description="Bounds.")
    speculative: SpeculativeConfig = Field(default_factory=SpeculativeConfig, description="Speculative decoding.")
    ring: RingConfig = Field(default_factory=RingConfig, description="The ring.")
    offload: OffloadConfig = Field(default_factory=OffloadConfig, description="KV outside of the devices.")
    peers: PeersConfig = Field(default_factory=PeersConfig, description="The prefill tier.")
    placement: GroupPlacementConfig = Field(
        default_factory=GroupPlacementConfig, description="Choice of the prefill node for a prompt."
    )
    breaker: BreakerConfig = Field(default_factory=BreakerConfig, description="Circuit breakers of the prefill nodes.")

    @property
    def prefix_tokens(self) -> int:
        """Value of `placement.prefix_tokens`, with its default."""
        chosen = self.placement.prefix_tokens
        return (PREFIX_TOKENS if self.storage.is_set else 0) if chosen is None else chosen

    @property
    def draft_model(self) -> Path | None:
        return self.speculative.model

    @property
    def window_slack_tokens(self) -> int:
        """Tokens of a sliding window for which pages are reserved in addition to those for one step of one token.

        They are for draft tokens, or for the next step, which is sent while this one runs.
        """
        return self.offload.window_slack_tokens(self.pool.page_size) + max(
            DECODE_STEPS_IN_FLIGHT - 1, self.speculative.most_draft_tokens
        )

    @model_validator(mode="after")
    def _check_one_list_of_prefill_nodes(self) -> Self:
        self.discovery.check_one_list(self.peers.prefill_nodes)
        return self

    @model_validator(mode="after")
    def _check_one_choice_of_graphs(self) -> Self:
        if self.cuda_graph_bs is not None and self.cuda_graph_max_bs is not None:
            raise ValueError(f"cuda_graph_bs and cuda_graph_max_bs ({self.cuda_graph_max_bs}) are both set; set one of them")
        return self

    @model_validator(mode="after")
    def _check_compiled_steps_are_captured(self) -> Self:
        if not self.torch_compile or self.device == "cpu":
            return self
        most = self.torch_compile_max_bs
        if self.kernels == "torch":
            raise ValueError("torch_compile is true, and kernels is torch; compiled steps run in CUDA graphs, which need Triton")
        if self.cuda_graph_max_bs == 0:
            raise ValueError("torch_compile is true, and cuda_graph_max_bs is 0; compiled steps run in CUDA graphs: raise it")
        if self.cuda_graph_bs is not None and not any(size <= most for size in self.cuda_graph_bs):
            raise ValueError(
                f"torch_compile is true, and cuda_graph_bs ({list(self.cuda_graph_bs)}) has no size of up to "
                f"torch_compile_max_bs ({most}); compiled steps run in CUDA graphs: add a size"
            )
        return self

    @model_validator(mode="after")
    def _check_draft_kv_is_on_the_device(self) -> Self:
        if self.speculative.model is not None and self.offload.device_window is not None:
            raise ValueError(
                f"speculative.method is draft_model, and offload.device_window is {self.offload.device_window}; the draft model "
                "reads no KV in host memory: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_store_has_host_memory(self) -> Self:
        if self.storage.is_set and not self.offload.is_on:
            name, value = ("directory", self.storage.directory) if self.storage.url is None else ("url", self.storage.url)
            raise ValueError(
                f"storage.{name} is {value}, and a decode node's pages go into the store from host memory, of which it has none; "
                "set offload.host_ratio or offload.host_memory"
            )
        return self

    @model_validator(mode="after")
    def _check_queue_outlasts_store(self) -> Self:
        look_s = self.storage.get_timeout_s + ANSWER_S
        if self.storage.is_set and self.limits.queue_timeout_s <= look_s:
            raise ValueError(
                f"limits.queue_timeout_s is {self.limits.queue_timeout_s:g}, and a request waits up to {look_s:g} s for a store "
                f"that does not answer (storage.get_timeout_s is {self.storage.get_timeout_s:g}); raise it or lower that"
            )
        return self


class ConnectorLimitsConfig(Section):
    """Limits of a connector. The engine itself limits its computation."""

    meet_timeout_s: Seconds = Field(
        default=60.0,
        description=(
            "Maximum wait for the other side: prefill waits for its engine to get or begin a prompt, decode for a prefill "
            "node to join."
        ),
    )
    hold_s: Seconds = Field(
        default=120.0,
        description="Prefill: maximum time to hold the pages of a computed prompt that no decode side has requested.",
    )
    prefill_retries: CountOrZero = Field(
        default=2,
        description="Decode: retries of a transfer, while the prefill side still has the prompt; 0 disables them.",
    )
    max_transfers: CountOrZero = Field(
        default=4096, description="Maximum transfers in flight on one side. Further ones are refused."
    )


class ConnectorConfig(InstanceConfig):
    """Settings of a connector with one or both sides. They are part of the engine's connector configuration."""

    role: ClassVar[str] = "connector"

    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Device of the engine's KV, set by the engine's adapter.")
    limits: ConnectorLimitsConfig = Field(default_factory=ConnectorLimitsConfig, description="Bounds.")
    chunk: ChunkConfig = Field(default_factory=ChunkConfig, description="Prefill: how prompts are cut.")
    staging: StagingConfig = Field(default_factory=StagingConfig, description="Prefill: staging memory.")
    ring: RingConfig = Field(default_factory=RingConfig, description="Decode: the ring.")
    peers: PeersConfig = Field(default_factory=PeersConfig, description="Decode: the prefill tier.")
    placement: PlacementConfig = Field(
        default_factory=PlacementConfig, description="Decode: choice of the prefill node for a prompt that names none."
    )
    breaker: BreakerConfig = Field(default_factory=BreakerConfig, description="Decode: circuit breakers of the prefill nodes.")
    leader: LeaderConfig = Field(default_factory=LeaderConfig, description="Engines that span hosts.")
    join_on_request: bool = Field(
        default=False,
        description=(
            "Decode: also join prefill nodes that requests name. Every caller can then make this process connect to any address."
        ),
    )

    @model_validator(mode="after")
    def _check_one_list_of_prefill_nodes(self) -> Self:
        self.discovery.check_one_list(self.peers.prefill_nodes)
        return self

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if self.transport.name == "inproc":
            raise ValueError("transport.name is inproc, which joins two ends of one process; an engine's ranks need another")
        return self

    @model_validator(mode="after")
    def _check_names_of_hosts(self) -> Self:
        if self.leader.address is not None and self.tls.is_set_up and not self.leader.peer_names:
            raise ValueError(
                f"leader.address is {self.leader.address} and leader.peer_names is empty; with TLS it must have the names of the "
                "certificates of the engine's hosts"
            )
        return self

    def for_replica(self, index: int, num_replicas: int) -> Self:
        """Return the settings of one of the data-parallel replicas of an engine, which have these settings in common.

        Each port that is not 0 is higher by the index.

        Raises:
            ConfigError: Two replicas would have one port, or a port is above 65535.
        """
        host, _, port = (self.leader.address or "").rpartition(":")
        ports = {"server.port": self.server.port, "server.http_port": self.server.http_port, "leader.address": int(port or 0)}
        _check_ports({name: first for name, first in ports.items() if first}, num_replicas)
        moved = {name: first + index if first else 0 for name, first in ports.items()}
        server = self.server.model_copy(update={"port": moved["server.port"], "http_port": moved["server.http_port"]})
        leader = self.leader if not host else self.leader.model_copy(update={"address": f"{host}:{moved['leader.address']}"})
        return self.model_copy(update={"server": server, "leader": leader})


def _check_ports(first_ports: Mapping[str, int], num_replicas: int) -> None:
    """Raise ConfigError if the port ranges of the replicas overlap or exceed the highest port."""
    before: tuple[str, int] | None = None
    for name, port in sorted(first_ports.items(), key=lambda one: one[1]):
        if port + num_replicas - 1 > MAX_PORT:
            raise ConfigError(
                f"{name} is {port}, and {num_replicas} data-parallel replicas need as many consecutive ports; it must be at most "
                f"{MAX_PORT - num_replicas + 1}"
            )
        if before is not None and port - before[1] < num_replicas:
            raise ConfigError(
                f"{before[0]} is {before[1]} and {name} is {port}; {num_replicas} data-parallel replicas have as many ports from "
                f"each on, so they must be {num_replicas} or more apart"
            )
        before = name, port


class StoreConnectorConfig(RootConfig):
    """Settings of a connector that adds kvferry's store below an engine's own offloading."""

    role: ClassVar[str] = "store connector"

    storage: StorageConfig = Field(default_factory=StorageConfig, description="The store.")
    offload: HostSizeConfig = Field(default_factory=HostSizeConfig, description="Host memory that pages pass through.")
    log: LogConfig = Field(default_factory=LogConfig, description="The log.")

    @model_validator(mode="after")
    def _check_both_tiers(self) -> Self:
        if not self.storage.is_set:
            raise ValueError("storage.directory and storage.url are null; set one of them")
        if not self.offload.is_on:
            raise ValueError(
                "offload.host_ratio and offload.host_memory are null, and pages go into the store through host memory; set one "
                "of them"
            )
        return self
