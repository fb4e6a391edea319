"""The spec is light, and every capability in it is one that the suite has proven."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

from hicache_core import StorageBackendFactory
from hicache_mooncake.spec import SPEC


def test_spec_is_found_by_its_entry_point():
    assert StorageBackendFactory.spec("mooncake") is SPEC


def test_spec_and_options_import_no_native_library():
    program = (
        "import sys, hicache_mooncake.spec, hicache_mooncake.options, hicache_mooncake.storage;"
        "sys.exit(any(name.split('.')[0] in ('mooncake', 'torch', 'xxhash') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_spec_promises_no_order_of_eviction():
    """A lease is renewed by contains too, which C15 forbids lru and approx."""
    assert SPEC.capabilities.eviction == "ttl"


def test_no_wheel_is_required_and_each_extra_asks_for_one_that_works():
    """All wheels install the package ``mooncake``; 0.3.12.post1 links against CUDA by mistake."""
    wheels = [line for line in requires("hicache-mooncake") or () if line.startswith("mooncake")]
    assert wheels == [
        "mooncake-transfer-engine-non-cuda>=0.3.13; extra == 'cpu'",
        "mooncake-transfer-engine>=0.3.11.post1; extra == 'cuda12'",
        "mooncake-transfer-engine-cuda13>=0.3.11.post1; extra == 'cuda13'",
    ]
