"""Options: what is refused before anything opens, with what to write instead."""

from __future__ import annotations

import pytest

from hicache_core.errors import InvalidOptions
from hicache_core.options import resolve
from hicache_mooncake.options import MooncakeOptions


def options(**given) -> MooncakeOptions:
    return resolve("mooncake", MooncakeOptions, {"master": "10.0.0.5:50051"} | given, environment={}).options


def complaint(**given) -> str:
    with pytest.raises(InvalidOptions) as raised:
        options(**given)
    return raised.value.value


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64mb", 64_000_000), ("1.5gb", 1_500_000_000), ("4GiB", 4 << 30), (64 << 20, 64 << 20), ("0", 0)],
)
def test_sizes_may_be_written_as_people_do(text, nbytes):
    assert options(segment_size=text).segment_size == nbytes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"segment_size": "1mb"},
            "segment_size: 1000000 bytes are too few for Mooncake (write 0, or 16MiB",
        ),
        (
            {"metadata_server": "redis://10.0.0.5:6379"},
            "write P2PHANDSHAKE, http://HOST:PORT/metadata or",
        ),
        ({"metadata_server": "garbage"}, "'garbage' is not one this backend can use"),
        ({"master": "http://10.0.0.5:50051"}, "'http://10.0.0.5:50051' is not an address (write HOST:PORT)"),
        ({"master": "10.0.0.5:99999"}, "is not an address"),
        ({"master": ""}, "'' is not an address"),
        ({"hostname": "tcp://me"}, "'tcp://me' is not a host"),
        ({"protocol": "udp"}, "protocol='udp': input should be 'tcp' or 'rdma'"),
        ({"device": "mlx5_0"}, "device='mlx5_0' needs protocol='rdma'"),
        ({"soft_pin": True, "hard_pin": True}, "soft_pin and hard_pin exclude each other"),
        ({"daemon": "127.0.0.1:1", "checksum": True}, "checksum cannot be had with daemon"),
        ({"daemon": "127.0.0.1:1", "preferred_segment": "local"}, "daemon gives none"),
        ({"extra": {"tenant_id": "x"}}, "it may not hold tenant_id"),
        (
            {"extra": {"LD_PRELOAD": "x"}},
            "'LD_PRELOAD' is neither an argument of setup() nor",
        ),
        ({"replicas": 0}, "replicas=0"),
        ({"segment_sise": "4gb"}, "segment_sise is unknown (segment_size?)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_mooncake_would_crash_or_hang_on_is_refused(given, expected):
    assert expected in complaint(**given)


def test_every_problem_is_told_at_once():
    text = complaint(protocol="udp", segment_size="4 gigs", protocl="tcp")
    assert [word in text for word in ("protocol='udp'", "4 gigs", "protocl is unknown")] == [True] * 3


def test_master_needs_no_port():
    assert options(master="store.internal").master == "store.internal:50051"


def test_metrics_are_looked_for_beside_the_master():
    assert options().metrics_address == "10.0.0.5:9003"
    assert options(metrics="10.0.0.5:9999").metrics_address == "10.0.0.5:9999"


@pytest.mark.parametrize("server", ["P2PHANDSHAKE", "http://10.0.0.5:8080/metadata", "etcd://a:2379,b:2379"])
def test_metadata_servers_that_work(server):
    assert options(metadata_server=server).metadata_server == server


def test_extra_passes_through():
    extra = {"enable_ssd_offload": True, "MC_SLICE_SIZE": 65536}
    assert options(extra=extra).extra == extra
