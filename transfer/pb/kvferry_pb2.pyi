from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShardInfo(_message.Message):
    __slots__ = ("tp_size", "pp_size", "page_size", "dtype", "order", "stage_layers", "dcp_size", "interleave_tokens")
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    STAGE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DCP_SIZE_FIELD_NUMBER: _ClassVar[int]
    INTERLEAVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tp_size: int
    pp_size: int
    page_size: int
    dtype: str
    order: str
    stage_layers: _containers.RepeatedScalarFieldContainer[int]
    dcp_size: int
    interleave_tokens: int
    def __init__(self, tp_size: _Optional[int] = ..., pp_size: _Optional[int] = ..., page_size: _Optional[int] = ..., dtype: _Optional[str] = ..., order: _Optional[str] = ..., stage_layers: _Optional[_Iterable[int]] = ..., dcp_size: _Optional[int] = ..., interleave_tokens: _Optional[int] = ...) -> None: ...

class LayerRun(_message.Message):
    __slots__ = ("num_layers", "kind", "num_kv_heads", "k_head_dim", "v_head_dim", "window_tokens", "dtype")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    K_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    V_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    kind: str
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window_tokens: int
    dtype: str
    def __init__(self, num_layers: _Optional[int] = ..., kind: _Optional[str] = ..., num_kv_heads: _Optional[int] = ..., k_head_dim: _Optional[int] = ..., v_head_dim: _Optional[int] = ..., window_tokens: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class LayoutInfo(_message.Message):
    __slots__ = ("dtype", "runs")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    runs: _containers.RepeatedCompositeFieldContainer[LayerRun]
    def __init__(self, dtype: _Optional[str] = ..., runs: _Optional[_Iterable[_Union[LayerRun, _Mapping]]] = ...) -> None: ...

class InstanceInfo(_message.Message):
    __slots__ = ("incarnation", "protocol_versions", "layout_fingerprint", "layout", "model_fingerprint", "model_fields", "shard", "transport", "digests", "capabilities", "version", "kv_scales", "transports", "attention")
    class ModelFieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELDS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KV_SCALES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    protocol_versions: _containers.RepeatedScalarFieldContainer[int]
    layout_fingerprint: str
    layout: LayoutInfo
    model_fingerprint: str
    model_fields: _containers.ScalarMap[str, str]
    shard: ShardInfo
    transport: str
    digests: _containers.RepeatedScalarFieldContainer[str]
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    version: str
    kv_scales: _containers.RepeatedCompositeFieldContainer[KVScales]
    transports: _containers.RepeatedScalarFieldContainer[str]
    attention: str
    def __init__(self, incarnation: _Optional[int] = ..., protocol_versions: _Optional[_Iterable[int]] = ..., layout_fingerprint: _Optional[str] = ..., layout: _Optional[_Union[LayoutInfo, _Mapping]] = ..., model_fingerprint: _Optional[str] = ..., model_fields: _Optional[_Mapping[str, str]] = ..., shard: _Optional[_Union[ShardInfo, _Mapping]] = ..., transport: _Optional[str] = ..., digests: _Optional[_Iterable[str]] = ..., capabilities: _Optional[_Iterable[str]] = ..., version: _Optional[str] = ..., kv_scales: _Optional[_Iterable[_Union[KVScales, _Mapping]]] = ..., transports: _Optional[_Iterable[str]] = ..., attention: _Optional[str] = ...) -> None: ...

class KVScales(_message.Message):
    __slots__ = ("k", "v")
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    k: float
    v: float
    def __init__(self, k: _Optional[float] = ..., v: _Optional[float] = ...) -> None: ...

class ChunkPlanInfo(_message.Message):
    __slots__ = ("chunk_tokens", "layers_per_group", "token_layers")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_PER_GROUP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    layers_per_group: int
    token_layers: int
    def __init__(self, chunk_tokens: _Optional[int] = ..., layers_per_group: _Optional[int] = ..., token_layers: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("decode", "decode_address", "rank_addresses", "heartbeat_s", "prefill_address")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANK_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    decode: InstanceInfo
    decode_address: str
    rank_addresses: _containers.RepeatedScalarFieldContainer[str]
    heartbeat_s: float
    prefill_address: str
    def __init__(self, decode: _Optional[_Union[InstanceInfo, _Mapping]] = ..., decode_address: _Optional[str] = ..., rank_addresses: _Optional[_Iterable[str]] = ..., heartbeat_s: _Optional[float] = ..., prefill_address: _Optional[str] = ...) -> None: ...

class JoinEvent(_message.Message):
    __slots__ = ("joined", "beat", "draining", "undrained", "already_joined")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    UNDRAINED_FIELD_NUMBER: _ClassVar[int]
    ALREADY_JOINED_FIELD_NUMBER: _ClassVar[int]
    joined: Joined
    beat: Beat
    draining: Draining
    undrained: Undrained
    already_joined: AlreadyJoined
    def __init__(self, joined: _Optional[_Union[Joined, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., undrained: _Optional[_Union[Undrained, _Mapping]] = ..., already_joined: _Optional[_Union[AlreadyJoined, _Mapping]] = ...) -> None: ...

class AlreadyJoined(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("prefill", "chunk_plan", "links", "short_chunk_plans")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_PLAN_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    SHORT_CHUNK_PLANS_FIELD_NUMBER: _ClassVar[int]
    prefill: InstanceInfo
    chunk_plan: ChunkPlanInfo
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    short_chunk_plans: _containers.RepeatedCompositeFieldContainer[ChunkPlanInfo]
    def __init__(self, prefill: _Optional[_Union[InstanceInfo, _Mapping]] = ..., chunk_plan: _Optional[_Union[ChunkPlanInfo, _Mapping]] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., short_chunk_plans: _Optional[_Iterable[_Union[ChunkPlanInfo, _Mapping]]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("others_tokens",)
    OTHERS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    others_tokens: int
    def __init__(self, others_tokens: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Undrained(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "start_token", "decode_incarnation", "sampling", "engine_request", "cache_salt", "early_room_plan")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ENGINE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    EARLY_ROOM_PLAN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    start_token: int
    decode_incarnation: int
    sampling: SamplingParams
    engine_request: str
    cache_salt: str
    early_room_plan: ChunkPlanInfo
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., start_token: _Optional[int] = ..., decode_incarnation: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., engine_request: _Optional[str] = ..., cache_salt: _Optional[str] = ..., early_room_plan: _Optional[_Union[ChunkPlanInfo, _Mapping]] = ...) -> None: ...

class PrefillMessage(_message.Message):
    __slots__ = ("request", "room")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    request: PrefillRequest
    room: PrefillRoom
    def __init__(self, request: _Optional[_Union[PrefillRequest, _Mapping]] = ..., room: _Optional[_Union[PrefillRoom, _Mapping]] = ...) -> None: ...

class PromptMessage(_message.Message):
    __slots__ = ("prompt", "message", "cancelled", "traceparent")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    prompt: int
    message: PrefillMessage
    cancelled: PromptCancelled
    traceparent: str
    def __init__(self, prompt: _Optional[int] = ..., message: _Optional[_Union[PrefillMessage, _Mapping]] = ..., cancelled: _Optional[_Union[PromptCancelled, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class PromptCancelled(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PromptEvent(_message.Message):
    __slots__ = ("prompt", "event", "status")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    prompt: int
    event: PrefillEvent
    status: PromptStatus
    def __init__(self, prompt: _Optional[int] = ..., event: _Optional[_Union[PrefillEvent, _Mapping]] = ..., status: _Optional[_Union[PromptStatus, _Mapping]] = ...) -> None: ...

class PromptStatus(_message.Message):
    __slots__ = ("code", "details", "spares_kv")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    SPARES_KV_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    spares_kv: bool
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ..., spares_kv: bool = ...) -> None: ...

class PrefillRoom(_message.Message):
    __slots__ = ("start_token",)
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    start_token: int
    def __init__(self, start_token: _Optional[int] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("started", "first_token", "sent", "note", "preempted", "room_wanted")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    ROOM_WANTED_FIELD_NUMBER: _ClassVar[int]
    started: PrefillStarted
    first_token: FirstToken
    sent: PrefillSent
    note: EngineNote
    preempted: PrefillPreempted
    room_wanted: PrefillRoomWanted
    def __init__(self, started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., sent: _Optional[_Union[PrefillSent, _Mapping]] = ..., note: _Optional[_Union[EngineNote, _Mapping]] = ..., preempted: _Optional[_Union[PrefillPreempted, _Mapping]] = ..., room_wanted: _Optional[_Union[PrefillRoomWanted, _Mapping]] = ...) -> None: ...

class PrefillRoomWanted(_message.Message):
    __slots__ = ("chunk_plan",)
    CHUNK_PLAN_FIELD_NUMBER: _ClassVar[int]
    chunk_plan: ChunkPlanInfo
    def __init__(self, chunk_plan: _Optional[_Union[ChunkPlanInfo, _Mapping]] = ...) -> None: ...

class PrefillPreempted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("queue_s",)
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    def __init__(self, queue_s: _Optional[float] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "compute_s")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    compute_s: float
    def __init__(self, token_id: _Optional[int] = ..., compute_s: _Optional[float] = ...) -> None: ...

class EngineNote(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class PrefillSent(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: TransferStats
    def __init__(self, stats: _Optional[_Union[TransferStats, _Mapping]] = ...) -> None: ...

class TransferStats(_message.Message):
    __slots__ = ("bytes", "writes", "writes_without_staging", "transfer_s", "exposed_s", "resends")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    WRITES_WITHOUT_STAGING_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    RESENDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    writes: int
    writes_without_staging: int
    transfer_s: float
    exposed_s: float
    resends: int
    def __init__(self, bytes: _Optional[int] = ..., writes: _Optional[int] = ..., writes_without_staging: _Optional[int] = ..., transfer_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., resends: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "token_ids", "max_new_tokens", "sampling", "stop_token_ids", "ignore_eos", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: str
    token_ids: TokenIds
    max_new_tokens: int
    sampling: SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., cache_salt: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("accepted", "tokens", "done")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    accepted: GenerateAccepted
    tokens: GeneratedTokens
    done: GenerateDone
    def __init__(self, accepted: _Optional[_Union[GenerateAccepted, _Mapping]] = ..., tokens: _Optional[_Union[GeneratedTokens, _Mapping]] = ..., done: _Optional[_Union[GenerateDone, _Mapping]] = ...) -> None: ...

class GenerateAccepted(_message.Message):
    __slots__ = ("request_id", "prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class GeneratedTokens(_message.Message):
    __slots__ = ("token_ids", "text")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ...) -> None: ...

class GenerateDone(_message.Message):
    __slots__ = ("finish_reason", "prompt_tokens", "generated_tokens", "stats", "ttft_s", "prefill_node", "retries", "cached_tokens")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    stats: TransferStats
    ttft_s: float
    prefill_node: str
    retries: int
    cached_tokens: int
    def __init__(self, finish_reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., stats: _Optional[_Union[TransferStats, _Mapping]] = ..., ttft_s: _Optional[float] = ..., prefill_node: _Optional[str] = ..., retries: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "prefill_incarnation", "decode_incarnation", "chunk_plan")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_PLAN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prefill_incarnation: int
    decode_incarnation: int
    chunk_plan: ChunkPlanInfo
    def __init__(self, request_id: _Optional[str] = ..., prefill_incarnation: _Optional[int] = ..., decode_incarnation: _Optional[int] = ..., chunk_plan: _Optional[_Union[ChunkPlanInfo, _Mapping]] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reserved", "start_token")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    reserved: bool
    start_token: int
    def __init__(self, reserved: bool = ..., start_token: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("prefill", "prefill_rank", "offer", "chunk_plan", "probe_bytes", "control_key")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_PLAN_FIELD_NUMBER: _ClassVar[int]
    PROBE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_KEY_FIELD_NUMBER: _ClassVar[int]
    prefill: InstanceInfo
    prefill_rank: int
    offer: bytes
    chunk_plan: ChunkPlanInfo
    probe_bytes: int
    control_key: bytes
    def __init__(self, prefill: _Optional[_Union[InstanceInfo, _Mapping]] = ..., prefill_rank: _Optional[int] = ..., offer: _Optional[bytes] = ..., chunk_plan: _Optional[_Union[ChunkPlanInfo, _Mapping]] = ..., probe_bytes: _Optional[int] = ..., control_key: _Optional[bytes] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("session_id", "decode", "decode_rank", "answer", "ring_capacity", "control_address", "heartbeat_s", "protocol_version", "probe_bytes", "control_key", "local_control_address")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    RING_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROBE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_KEY_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    decode: InstanceInfo
    decode_rank: int
    answer: bytes
    ring_capacity: int
    control_address: str
    heartbeat_s: float
    protocol_version: int
    probe_bytes: int
    control_key: bytes
    local_control_address: str
    def __init__(self, session_id: _Optional[int] = ..., decode: _Optional[_Union[InstanceInfo, _Mapping]] = ..., decode_rank: _Optional[int] = ..., answer: _Optional[bytes] = ..., ring_capacity: _Optional[int] = ..., control_address: _Optional[str] = ..., heartbeat_s: _Optional[float] = ..., protocol_version: _Optional[int] = ..., probe_bytes: _Optional[int] = ..., control_key: _Optional[bytes] = ..., local_control_address: _Optional[str] = ...) -> None: ...

class WriterBeat(_message.Message):
    __slots__ = ("session_id", "link", "idle_heartbeat_s", "wants_probe_turn")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    IDLE_HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    WANTS_PROBE_TURN_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    link: LinkStatus
    idle_heartbeat_s: float
    wants_probe_turn: bool
    def __init__(self, session_id: _Optional[int] = ..., link: _Optional[_Union[LinkStatus, _Mapping]] = ..., idle_heartbeat_s: _Optional[float] = ..., wants_probe_turn: bool = ...) -> None: ...

class WatermarkAck(_message.Message):
    __slots__ = ("incarnation", "sequence", "round", "tail", "released", "idle_heartbeat_s", "probe_turn")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    IDLE_HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    PROBE_TURN_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    sequence: int
    round: int
    tail: int
    released: _containers.RepeatedCompositeFieldContainer[ReleasedRange]
    idle_heartbeat_s: float
    probe_turn: bool
    def __init__(self, incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., round: _Optional[int] = ..., tail: _Optional[int] = ..., released: _Optional[_Iterable[_Union[ReleasedRange, _Mapping]]] = ..., idle_heartbeat_s: _Optional[float] = ..., probe_turn: bool = ...) -> None: ...

class ReleasedRange(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("remaining",)
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    remaining: int
    def __init__(self, remaining: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("was_draining",)
    WAS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    was_draining: bool
    def __init__(self, was_draining: bool = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ("level_before",)
    LEVEL_BEFORE_FIELD_NUMBER: _ClassVar[int]
    level_before: str
    def __init__(self, level_before: _Optional[str] = ...) -> None: ...

class SwitchRoleRequest(_message.Message):
    __slots__ = ("role", "drain_budget_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    drain_budget_s: float
    def __init__(self, role: _Optional[str] = ..., drain_budget_s: _Optional[float] = ...) -> None: ...

class SwitchRoleResponse(_message.Message):
    __slots__ = ("role", "role_before", "incarnation")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROLE_BEFORE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    role: str
    role_before: str
    incarnation: int
    def __init__(self, role: _Optional[str] = ..., role_before: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "total")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestStatus]
    total: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestStatus, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class RequestStatus(_message.Message):
    __slots__ = ("request_id", "transfer_id", "stage", "age_s", "prompt_tokens", "ready_tokens", "generated_tokens", "max_new_tokens", "peer", "retries", "ranks_done", "role")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    RANKS_DONE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    transfer_id: str
    stage: str
    age_s: float
    prompt_tokens: int
    ready_tokens: int
    generated_tokens: int
    max_new_tokens: int
    peer: str
    retries: int
    ranks_done: int
    role: str
    def __init__(self, request_id: _Optional[str] = ..., transfer_id: _Optional[str] = ..., stage: _Optional[str] = ..., age_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., ready_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., peer: _Optional[str] = ..., retries: _Optional[int] = ..., ranks_done: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("role", "state", "instance", "uptime_s", "queued_requests", "running_requests", "ranks", "peers", "links", "restarts", "ready", "not_ready_reason", "memory_plan", "version", "draining", "log_level", "http_port", "time_s", "discovery", "other_side")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PLAN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    HTTP_PORT_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    DISCOVERY_FIELD_NUMBER: _ClassVar[int]
    OTHER_SIDE_FIELD_NUMBER: _ClassVar[int]
    role: str
    state: str
    instance: InstanceInfo
    uptime_s: float
    queued_requests: int
    running_requests: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    restarts: int
    ready: bool
    not_ready_reason: str
    memory_plan: MemoryPlan
    version: str
    draining: bool
    log_level: str
    http_port: int
    time_s: float
    discovery: DiscoveryStatus
    other_side: NodeStatus
    def __init__(self, role: _Optional[str] = ..., state: _Optional[str] = ..., instance: _Optional[_Union[InstanceInfo, _Mapping]] = ..., uptime_s: _Optional[float] = ..., queued_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., restarts: _Optional[int] = ..., ready: bool = ..., not_ready_reason: _Optional[str] = ..., memory_plan: _Optional[_Union[MemoryPlan, _Mapping]] = ..., version: _Optional[str] = ..., draining: bool = ..., log_level: _Optional[str] = ..., http_port: _Optional[int] = ..., time_s: _Optional[float] = ..., discovery: _Optional[_Union[DiscoveryStatus, _Mapping]] = ..., other_side: _Optional[_Union[NodeStatus, _Mapping]] = ...) -> None: ...

class DiscoveryStatus(_message.Message):
    __slots__ = ("where", "addresses", "waiting", "problem", "age_s", "failures", "refused_entries")
    WHERE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    where: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    waiting: _containers.RepeatedScalarFieldContainer[str]
    problem: str
    age_s: float
    failures: int
    refused_entries: int
    def __init__(self, where: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., waiting: _Optional[_Iterable[str]] = ..., problem: _Optional[str] = ..., age_s: _Optional[float] = ..., failures: _Optional[int] = ..., refused_entries: _Optional[int] = ...) -> None: ...

class MemoryPlan(_message.Message):
    __slots__ = ("policy", "static_fraction", "device_bytes", "reserved_bytes", "cell_bytes", "max_total_tokens", "free_bytes", "lines", "advice", "warnings")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    STATIC_FRACTION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CELL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    static_fraction: float
    device_bytes: int
    reserved_bytes: int
    cell_bytes: int
    max_total_tokens: int
    free_bytes: int
    lines: _containers.RepeatedCompositeFieldContainer[MemoryLine]
    advice: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, policy: _Optional[str] = ..., static_fraction: _Optional[float] = ..., device_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., cell_bytes: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., free_bytes: _Optional[int] = ..., lines: _Optional[_Iterable[_Union[MemoryLine, _Mapping]]] = ..., advice: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class MemoryLine(_message.Message):
    __slots__ = ("name", "planned_bytes", "formula", "inside", "real_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLANNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORMULA_FIELD_NUMBER: _ClassVar[int]
    INSIDE_FIELD_NUMBER: _ClassVar[int]
    REAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    planned_bytes: int
    formula: str
    inside: str
    real_bytes: int
    def __init__(self, name: _Optional[str] = ..., planned_bytes: _Optional[int] = ..., formula: _Optional[str] = ..., inside: _Optional[str] = ..., real_bytes: _Optional[int] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "pid", "pool_pages", "pool_pages_reserved", "pool_pages_bound", "ring_capacity", "ring_live_bytes", "ring_peak_bytes", "ring_quarantined_bytes", "ring_live_grants", "watermark_position", "staging_slots", "staging_slots_used", "requests", "sessions", "watermark_acks", "dropped_messages", "pools", "refused_connections", "pending_transfers", "ending_sessions", "open_files", "threads", "resident_bytes", "idle_checks", "link_uses", "ring_oldest_open")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    POOL_PAGES_FIELD_NUMBER: _ClassVar[int]
    POOL_PAGES_RESERVED_FIELD_NUMBER: _ClassVar[int]
    POOL_PAGES_BOUND_FIELD_NUMBER: _ClassVar[int]
    RING_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    RING_LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RING_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RING_QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RING_LIVE_GRANTS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_POSITION_FIELD_NUMBER: _ClassVar[int]
    STAGING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STAGING_SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_ACKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    PENDING_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ENDING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_CHECKS_FIELD_NUMBER: _ClassVar[int]
    LINK_USES_FIELD_NUMBER: _ClassVar[int]
    RING_OLDEST_OPEN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    pool_pages: int
    pool_pages_reserved: int
    pool_pages_bound: int
    ring_capacity: int
    ring_live_bytes: int
    ring_peak_bytes: int
    ring_quarantined_bytes: int
    ring_live_grants: int
    watermark_position: int
    staging_slots: int
    staging_slots_used: int
    requests: int
    sessions: int
    watermark_acks: int
    dropped_messages: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    refused_connections: int
    pending_transfers: int
    ending_sessions: int
    open_files: int
    threads: int
    resident_bytes: int
    idle_checks: int
    link_uses: _containers.RepeatedCompositeFieldContainer[LinkUse]
    ring_oldest_open: int
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., pool_pages: _Optional[int] = ..., pool_pages_reserved: _Optional[int] = ..., pool_pages_bound: _Optional[int] = ..., ring_capacity: _Optional[int] = ..., ring_live_bytes: _Optional[int] = ..., ring_peak_bytes: _Optional[int] = ..., ring_quarantined_bytes: _Optional[int] = ..., ring_live_grants: _Optional[int] = ..., watermark_position: _Optional[int] = ..., staging_slots: _Optional[int] = ..., staging_slots_used: _Optional[int] = ..., requests: _Optional[int] = ..., sessions: _Optional[int] = ..., watermark_acks: _Optional[int] = ..., dropped_messages: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., refused_connections: _Optional[int] = ..., pending_transfers: _Optional[int] = ..., ending_sessions: _Optional[int] = ..., open_files: _Optional[int] = ..., threads: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., idle_checks: _Optional[int] = ..., link_uses: _Optional[_Iterable[_Union[LinkUse, _Mapping]]] = ..., ring_oldest_open: _Optional[int] = ...) -> None: ...

class LinkUse(_message.Message):
    __slots__ = ("peer_incarnation", "decode_rank", "written_bytes", "busy_s", "probe_s")
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    PROBE_S_FIELD_NUMBER: _ClassVar[int]
    peer_incarnation: int
    decode_rank: int
    written_bytes: int
    busy_s: float
    probe_s: float
    def __init__(self, peer_incarnation: _Optional[int] = ..., decode_rank: _Optional[int] = ..., written_bytes: _Optional[int] = ..., busy_s: _Optional[float] = ..., probe_s: _Optional[float] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("group", "pages", "reserved", "bound")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    group: str
    pages: int
    reserved: int
    bound: int
    def __init__(self, group: _Optional[str] = ..., pages: _Optional[int] = ..., reserved: _Optional[int] = ..., bound: _Optional[int] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("address", "incarnation", "state", "reason", "chunk_plan", "largest_piece_bytes", "breaker", "breaker_reason", "breaker_pause_s", "outstanding_tokens", "is_unnamed", "others_tokens")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHUNK_PLAN_FIELD_NUMBER: _ClassVar[int]
    LARGEST_PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    BREAKER_REASON_FIELD_NUMBER: _ClassVar[int]
    BREAKER_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_UNNAMED_FIELD_NUMBER: _ClassVar[int]
    OTHERS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: int
    state: str
    reason: str
    chunk_plan: ChunkPlanInfo
    largest_piece_bytes: int
    breaker: str
    breaker_reason: str
    breaker_pause_s: float
    outstanding_tokens: int
    is_unnamed: bool
    others_tokens: int
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., chunk_plan: _Optional[_Union[ChunkPlanInfo, _Mapping]] = ..., largest_piece_bytes: _Optional[int] = ..., breaker: _Optional[str] = ..., breaker_reason: _Optional[str] = ..., breaker_pause_s: _Optional[float] = ..., outstanding_tokens: _Optional[int] = ..., is_unnamed: bool = ..., others_tokens: _Optional[int] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("prefill_rank", "decode_rank", "lane", "latency_s", "bandwidth_bytes_per_s", "peer_incarnation", "obstacle")
    PREFILL_RANK_FIELD_NUMBER: _ClassVar[int]
    DECODE_RANK_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    prefill_rank: int
    decode_rank: int
    lane: str
    latency_s: float
    bandwidth_bytes_per_s: float
    peer_incarnation: int
    obstacle: str
    def __init__(self, prefill_rank: _Optional[int] = ..., decode_rank: _Optional[int] = ..., lane: _Optional[str] = ..., latency_s: _Optional[float] = ..., bandwidth_bytes_per_s: _Optional[float] = ..., peer_incarnation: _Optional[int] = ..., obstacle: _Optional[str] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("version", "instance", "rank", "control_key")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CONTROL_KEY_FIELD_NUMBER: _ClassVar[int]
    version: str
    instance: str
    rank: int
    control_key: bytes
    def __init__(self, version: _Optional[str] = ..., instance: _Optional[str] = ..., rank: _Optional[int] = ..., control_key: _Optional[bytes] = ...) -> None: ...

class MeetResponse(_message.Message):
    __slots__ = ("session_id", "control_address", "control_key", "local_control_address")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_KEY_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    control_address: str
    control_key: bytes
    local_control_address: str
    def __init__(self, session_id: _Optional[int] = ..., control_address: _Optional[str] = ..., control_key: _Optional[bytes] = ..., local_control_address: _Optional[str] = ...) -> None: ...
