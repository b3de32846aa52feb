"""Settings: sources and their order, what is refused and how, and that the page of documentation is the code's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.instances import decode_config, prefill_config
from transfer.config import (
    ConnectorConfig,
    DecodeNodeConfig,
    DiscoveryConfig,
    NodeConfig,
    PrefillNodeConfig,
    parse_size,
    settings,
)
from transfer.config.__main__ import configuration_page
from transfer.errors import ConfigError
from transfer.layout import DType, TokenOrder
from transfer.load_config import load_config
from transfer.plain_text import check_plain_text

ROOT = Path(__file__).resolve().parents[2]


def prefill(*overrides: str, **flags: object) -> PrefillNodeConfig:
    return load_config(PrefillNodeConfig, flags={"model": "m", **flags}, overrides=overrides)


def decode(*overrides: str, **flags: object) -> DecodeNodeConfig:
    return load_config(DecodeNodeConfig, flags={"model": "m", **flags}, overrides=overrides)


def refused(config_type: type[NodeConfig] = DecodeNodeConfig, **sources: Any) -> list[str]:
    sources.setdefault("flags", {"model": "m"})
    with pytest.raises(ConfigError) as caught:
        load_config(config_type, **sources)
    return str(caught.value).splitlines()


def yaml_file(folder: Path, text: str) -> Path:
    file = folder / "node.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_flags_beat_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    pool = "pool:\n  page_size: 1\n  num_pages: 5000\n  order: HND\n"
    file = yaml_file(tmp_path, f"model: from-file\n{pool}chunk:\n  chunk_tokens: 64\n")
    environment = {"KVFERRY_POOL__PAGE_SIZE": "2", "KVFERRY_POOL__NUM_PAGES": "6000", "PATH": "/bin"}
    flags = {"pool.page_size": 3, "server.port": None}
    config = load_config(PrefillNodeConfig, file=file, environment=environment, flags=flags)
    assert config.model == Path("from-file")
    assert (config.pool.page_size, config.pool.num_pages, config.pool.order) == (3, 6000, TokenOrder.HND)
    assert config.chunk.chunk_tokens == 64
    assert config.staging.num_slots == 4
    config = load_config(PrefillNodeConfig, file=file, environment=environment, flags=flags, overrides=["pool.page_size=4"])
    assert config.pool.page_size == 4


def test_every_kind_of_value_can_come_from_text() -> None:
    config = decode(
        "ring.capacity_bytes=1MiB",
        "peers.prefill_nodes=a:1, [::1]:2",
        "limits.queue_timeout_s=0.5",
        "pool.dtype=bfloat16",
        "pool.order=HND",
        "parallel.pp_size=1",
        "transport.ucx.lane=shm",
        "ready_file=/run/x.json",
        "log.format=json",
    )
    assert config.ring.capacity_bytes == 1 << 20
    assert config.peers.prefill_nodes == ("a:1", "[::1]:2")
    assert config.limits.queue_timeout_s == 0.5
    assert (config.pool.dtype, config.pool.order) == (DType.BFLOAT16, TokenOrder.HND)
    assert config.transport.ucx.lane == "shm"
    assert config.ready_file == Path("/run/x.json")
    assert decode("ready_file=null").ready_file is None


def test_a_file_may_hold_lists_empty_sections_and_yamls_own_words(tmp_path: Path) -> None:
    text = "model: m\npool:\ntransport:\n  ucx:\n    lane: net\nready_file: null\n"
    text += "peers:\n  prefill_nodes: [h:1, h:2]\n"
    config = load_config(DecodeNodeConfig, file=yaml_file(tmp_path, text))
    assert config.pool.page_size == 16
    assert config.transport.ucx.lane == "net"
    assert config.peers.prefill_nodes == ("h:1", "h:2")
    with pytest.raises(ConfigError, match="model is missing"):
        load_config(DecodeNodeConfig, file=yaml_file(tmp_path, ""))


@pytest.mark.parametrize("empty", ["pool:", "pool: {}"])
def test_an_empty_section_of_a_stronger_source_changes_nothing(tmp_path: Path, empty: str) -> None:
    weaker = {"other role": {"pool": {"page_size": 8}}}
    assert load_config(PrefillNodeConfig, file=yaml_file(tmp_path, f"model: m\n{empty}\n"), defaults=weaker).pool.page_size == 8


def test_pool_tokens_are_rounded_up_to_pages() -> None:
    assert prefill("pool.num_tokens=1000").pool.num_pages == 63
    assert refused(overrides=["pool.num_tokens=1000", "pool.num_pages=5"]) == [
        "pool.num_pages is 5 and num_tokens is 1000; set one of them"
    ]


def test_a_config_is_immutable_and_travels_to_rank_processes() -> None:
    config = decode("pool.num_tokens=1000", "ring.capacity_bytes=512")
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and copy.pool.num_pages == 63
    assert (config.role, prefill().role) == ("decode", "prefill")
    with pytest.raises(ValueError, match="frozen"):
        config.pool.page_size = 5


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("pool.page_size=0", "pool.page_size is 0 (from --set); it must be at least 1"),
        ("pool.page_size=x", "pool.page_size is x (from --set); it must be a whole number"),
        (
            "transport.name=rdma",
            "transport.name is rdma (from --set); it must be auto, shm, ucx, nixl or cuda_ipc; rdma is a protocol",
        ),
        (
            "transport.cuda_ipc.handles=fabric",
            "transport.cuda_ipc.handles is fabric (from --set), and memory with fabric handles (multi-node NVLink) is not "
            "implemented; set it to ipc, and transport.name to auto, nixl or ucx between hosts",
        ),
        ("limits.queue_timeout_s=0", "limits.queue_timeout_s is 0 (from --set); it must be above 0"),
        ("limits.queue_timeout_s=nan", "limits.queue_timeout_s is nan (from --set); it must be above 0"),
        (
            "ring.capacity_bytes=64XB",
            "ring.capacity_bytes is 64XB (from --set); it must be a size, for example 4096, 64MiB or 1GB "
            "(KiB, MiB, GiB, TiB; KB, MB, GB, TB)",
        ),
        ("ring.capacity_bytes=1000", "ring.capacity_bytes is 1000 (from --set); it must be a multiple of 256, for example 64MiB"),
        ("pool.pagesize=5", "pool.pagesize is no setting (from --set); did you mean pool.page_size?"),
        ("log.zzz=5", "log.zzz is no setting (from --set); known here: level, format"),
        ("staging.num_slots=4", "staging.num_slots is no setting (from --set) of decode-node; it is one of prefill-node"),
        ("pool=5", "pool is 5 (from --set); it must be a section of settings"),
        ("nonsense", "--set nonsense: it must be path=value, for example --set pool.page_size=32"),
        (
            "server.host=0.0.0.0",
            "server.host is 0.0.0.0 (from --set), which no peer can connect to; server.advertise_host must name this machine",
        ),
        (
            "peers.prefill_nodes=host",
            "peers.prefill_nodes.0 is host (from --set); it must be host:port with a port from 1 to 65535, an IPv6 host in",
        ),
        ("peers.prefill_nodes=a:1,a:1", "peers.prefill_nodes names a:1 more than once; each must be there once"),
        ("restart.max_backoff_s=0.5", "restart.max_backoff_s is 0.5 (from --set); it must be at least backoff_s, 1.0"),
    ],
)
def test_a_problem_is_one_line_with_path_value_source_and_what_is_right(override: str, line: str) -> None:
    lines = refused(overrides=[override])
    assert len(lines) == 1
    assert lines[0].startswith(line)


def test_a_chunk_must_fit_the_pool_that_it_is_computed_in() -> None:
    assert refused(PrefillNodeConfig, overrides=["chunk.chunk_tokens=100000"]) == [
        "chunk.chunk_tokens is 100000 (from --set); it must fit the pool's 16384 tokens (1024 pages of 16)"
    ]


def test_a_request_may_wait_longer_than_for_a_store_that_does_not_answer() -> None:
    with_store = ["offload.host_ratio=1", "storage.directory=/kv", "storage.get_timeout_s=4"]
    assert refused(DecodeNodeConfig, overrides=[*with_store, "limits.queue_timeout_s=4.5"]) == [
        "limits.queue_timeout_s is 4.5 (from --set), and a request waits up to 4.5 s for a store that does not answer "
        "(storage.get_timeout_s is 4); raise it or lower that"
    ]
    assert decode(*with_store, "limits.queue_timeout_s=4.6").limits.queue_timeout_s == 4.6
    assert decode("limits.queue_timeout_s=0.1").limits.queue_timeout_s == 0.1


def test_all_problems_are_told_at_once_with_their_sources(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "pool:\n  page_size: true\n  colour: red\n")
    lines = refused(file=file, environment={"KVFERRY_LOG__LEVEL": "loud", "KVFERRY_TYPO": "1"}, flags={"parallel.tp_size": 0})
    assert lines == [
        "log.level is loud (from KVFERRY_LOG__LEVEL); it must be one of 'debug', 'info', 'warning' or 'error'",
        "model is missing; it must be given: Hugging Face model directory: config.json, safetensors, tokenizer.",
        "parallel.tp_size is 0 (from flag); it must be at least 1",
        f"pool.page_size is True (from {file}); it must be a number",
        f"pool.colour is no setting (from {file}); known here: page_size, num_pages, num_tokens, order, dtype",
        next(line for line in lines if line.startswith("typo is no setting (from KVFERRY_TYPO); ")),
    ]


def test_a_section_that_is_one_value_in_one_source_is_told_when_another_sets_something_in_it(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "pool: 5\ntransport:\n  ucx: fast\n")
    environment = {"KVFERRY_POOL__PAGE_SIZE": "2", "KVFERRY_POOL__ORDER": "HND", "KVFERRY_TRANSPORT__UCX__LANE": "net"}
    assert refused(file=file, environment=environment) == [
        f"pool is 5 (from {file}); it is a section, its settings are pool.NAME",
        f"transport.ucx is fast (from {file}); it is a section, its settings are transport.ucx.NAME",
    ]
    assert refused(environment={"KVFERRY_POOL__PAGE_SIZE": "2"}, overrides=["pool=5"]) == [
        "pool is 5 (from --set); it is a section, its settings are pool.NAME"
    ]


def test_a_setting_has_none_inside(tmp_path: Path) -> None:
    line = "pool.page_size.x is no setting (from {}); pool.page_size is none that has others inside"
    file = yaml_file(tmp_path, "pool:\n  page_size:\n    x: 1\n")
    assert refused(file=file, overrides=["pool.page_size=4"]) == [line.format(file)]
    assert refused(overrides=["pool.page_size=4", "pool.page_size.x=1"]) == [line.format("--set")]


SERVICE_LINKS = {
    f"KVFERRY_{service}{name}": text
    for service in ("", "PREFILL_", "PREFILL_TIER_2_")
    for name, text in {
        "SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "7001", "SERVICE_PORT_GRPC": "7001", "PORT": "tcp://10.0.0.1:7001",
        "PORT_7001_TCP": "tcp://10.0.0.1:7001", "PORT_7001_TCP_PROTO": "tcp", "PORT_7001_TCP_PORT": "7001",
        "PORT_7001_TCP_ADDR": "10.0.0.1", "PORT_53_UDP": "udp://10.0.0.1:53",
    }.items()
}  # fmt: skip


def test_settings_of_speculative_decoding_that_do_not_fit_are_named() -> None:
    wrong = {"method": "eagle", "num_speculative_tokens": 33, "prompt_lookup_min": 0}
    lines = refused(flags={"model": "m"} | {f"speculative.{name}": value for name, value in wrong.items()})
    assert len(lines) == 3 and [line.split()[0] for line in lines] == [f"speculative.{name}" for name in wrong], lines
    (line,) = refused(flags={"model": "m", "speculative.prompt_lookup_min": 6})
    assert "prompt_lookup_min is 6 (from flag); it must be at most prompt_lookup_max, 5" in line
    for given in (
        {"speculative.method": "draft_model"},
        {"speculative.model": "d"},
        {"speculative.method": "ngram", "speculative.model": "d"},
    ):
        (line,) = refused(flags={"model": "m"} | given)
        assert "set model if and only if method is draft_model" in line
    draft = {"speculative.method": "draft_model", "speculative.model": "d", "offload.host_ratio": 2, "offload.device_window": 64}
    (line,) = refused(flags={"model": "m"} | draft)
    assert "speculative.method is draft_model (from flag), and offload.device_window is 64" in line
    sparse = {"model": "m", "speculative.model": "d", "prefill.sparse_policy": "xattention"}
    (line,) = refused(PrefillNodeConfig, flags=sparse)
    assert "prefill.sparse_policy is xattention (from flag), and speculative.model is d" in line
    assert decode().speculative.most_draft_tokens == 0


def test_what_kubernetes_sets_for_a_service_is_ignored() -> None:
    config = load_config(DecodeNodeConfig, flags={"model": "m"}, environment=SERVICE_LINKS)
    assert config == decode()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KVFERRY_HTTP_PORT", "9000"),
        ("KVFERRY_SERVER_SERVICE_HOST", "10.0.0.1"),
        ("KVFERRY_PREFILL_NODES", "h:1"),
    ],
)
def test_what_may_be_a_mistyped_setting_is_refused_also_if_it_is_like_kubernetes(name: str, text: str) -> None:
    lines = refused(environment={name: text})
    assert len(lines) == 1 and f"is no setting (from {name})" in lines[0]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("heartbeat: " + "[" * 5000, "is nested too deeply; it must hold settings"),
        ("pool: &a\n  page_size: *a\n", "pool"),
        ("pool: 5\n", "pool is 5"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, named: str) -> None:
    lines = refused(file=yaml_file(tmp_path, text))
    assert len(lines) == 1 and named in lines[0]


def test_a_variable_that_is_like_no_setting_is_not_answered_with_all_settings() -> None:
    assert refused(environment={"KVFERRY_FOO": "4"}) == [
        "foo is no setting (from KVFERRY_FOO); KVFERRY_FOO is not a variable of kvferry"
    ]


def test_a_file_that_is_not_yaml_is_shown_with_the_place(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "pool:\n  a: b: c\n")
    assert refused(file=file) == [
        f"{file}:2:7: it is not YAML: mapping values are not allowed here",
        "    a: b: c",
        "        ^",
    ]
    file = yaml_file(tmp_path, "model: m\nmodel: n\n")
    assert refused(file=file)[0] == f"{file}:2:1: it is not YAML: model is there twice"
    file = yaml_file(tmp_path, "a: \x07")
    assert len(refused(file=file)) == 1


def test_a_value_that_is_not_utf8_is_refused_whatever_it_is_and_wherever_it_comes_from(tmp_path: Path) -> None:
    """The library that checks settings fails on it where it has to quote it."""
    no_text = b"a\xff".decode(errors="surrogateescape")
    says = "is 'a\\udcff' (from {}); it must be UTF-8"
    file = yaml_file(tmp_path, 'engine: "a\\uDCFF"\n')
    for sources, line in (
        ({"file": file}, f"engine {says.format(file)}"),
        ({"flags": {"tls.cert_file": Path(no_text)}}, f"tls.cert_file {says.format('flag')}"),
        ({"environment": {"KVFERRY_STORAGE__URL": no_text}}, f"storage.url {says.format('KVFERRY_STORAGE__URL')}"),
    ):
        assert refused(**sources) == [line]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert refused(file=tmp_path / "absent.yaml") == [
        f"config file {tmp_path}/absent.yaml cannot be read: No such file or directory"
    ]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not YAML" in refused(file=tmp_path / "binary.yaml")[0]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("64MiB", 64 << 20), ("1GB", 10**9), ("1.5 KiB", 1536), (" 2 kb ", 2000), ("0.5TiB", 1 << 39), (7, 7)],
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5", "1e6", "1 Mi B", "1.0001KiB", True])
def test_invalid_sizes_are_rejected(text: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_size(text)


@pytest.mark.parametrize("config_type", [PrefillNodeConfig, DecodeNodeConfig])
def test_every_setting_is_described_and_valid_by_default(config_type: type[NodeConfig]) -> None:
    for path, field in settings(config_type):
        assert field.description and field.description.endswith("."), path
    load_config(config_type, flags={"model": "m"})


def test_the_page_of_documentation_is_fresh() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == configuration_page(), "run: python -m transfer.config > docs/configuration.md"


ETCD = {"kind": "etcd", "etcd_endpoints": ("https://etcd-0:2379",)}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "dns"}, "dns_name is missing; it must be host:port, for example kvferry-prefill:7100"),
        ({"kind": "etcd"}, "etcd_endpoints is empty; it must name members"),
        ({"dns_name": "a:1"}, "dns_name is a:1 and kind is static; set discovery.kind to dns, or leave it out"),
        ({"kind": "etcd", "etcd_endpoints": ["etcd:2379"]}, "it must be https://host:port or http://host:port"),
        ({"kind": "etcd", "etcd_endpoints": ["https://a:1", "https://a:1"]}, "names a member more than once"),
        ({**ETCD, "etcd_prefix": "kv ferry/"}, "1 to 200 visible ASCII characters"),
        ({**ETCD, "etcd_user": "me"}, "etcd_user is me and etcd_password_file is missing; set both or neither"),
    ],
)
def test_discovery_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=r"[\s\S]*") as refused:
        DiscoveryConfig(**settings)
    assert problem in str(refused.value)


def test_one_list_of_prefill_nodes(tmp_path: Path) -> None:
    for other in ({"file": "nodes.yaml"}, {"kind": "dns", "dns_name": "a:1"}):
        with pytest.raises(ValueError, match=r"peers\.prefill_nodes is 127\.0\.0\.1:1 and discovery\.(file|kind) is .*; set one"):
            decode_config(tmp_path, peers={"prefill_nodes": ["127.0.0.1:1"]}, discovery=other)


def test_members_come_from_the_environment_too(tmp_path: Path) -> None:
    environment = {
        "KVFERRY_MODEL": str(tmp_path),
        "KVFERRY_DISCOVERY__KIND": "etcd",
        "KVFERRY_DISCOVERY__ETCD_ENDPOINTS": "https://a:2379, https://[::1]:2379",
    }
    config = load_config(DecodeNodeConfig, environment=environment)
    assert config.discovery.etcd_endpoints == ("https://a:2379", "https://[::1]:2379") and config.discovery.finds_nodes


def test_etcd_in_plain_text_needs_what_plain_text_needs(tmp_path: Path) -> None:
    for endpoint in ("http://127.0.0.1:2379", "http://localhost:2379", "https://etcd-0:2379"):
        check_plain_text(prefill_config(tmp_path, discovery={**ETCD, "etcd_endpoints": [endpoint]}))
    away = {**ETCD, "etcd_endpoints": ["https://a:1", "http://etcd-0:2379"]}
    with pytest.raises(ConfigError, match=r"etcd_endpoints is http://etcd-0:2379, .* use https://etcd-0:2379, or allow"):
        check_plain_text(prefill_config(tmp_path, discovery=away))
    check_plain_text(prefill_config(tmp_path, discovery=away, tls={"insecure": 2}))
    files = {name: tmp_path / name for name in ("cert_file", "key_file", "ca_file")}
    with pytest.raises(ConfigError, match="which is not a loopback address"):
        check_plain_text(prefill_config(tmp_path, discovery=away, tls=files))


def test_a_prefix_is_worth_a_step_where_there_is_a_store(tmp_path: Path) -> None:
    store = {"storage": {"directory": tmp_path}, "offload": {"host_ratio": 1.0}}
    assert decode_config(tmp_path).prefix_tokens == 0 and decode_config(tmp_path, **store).prefix_tokens == 512
    assert decode_config(tmp_path, **store, placement={"prefix_tokens": 0}).prefix_tokens == 0
    assert decode_config(tmp_path, placement={"prefix_tokens": 4096}).prefix_tokens == 4096


def test_an_engine_joins_every_node_that_a_request_may_name() -> None:
    with pytest.raises(ConfigError, match=r"placement\.group_size is no setting \(from flag\)"):
        load_config(ConnectorConfig, flags={"tls.insecure": 1, "placement.group_size": 4})
