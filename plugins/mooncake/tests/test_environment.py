"""C16: what the library is told by environment variables, and what is left of that."""

from __future__ import annotations

import ctypes
import os

import pytest

from hicache_mooncake._environment import native_environment, variables_of

LIBC = ctypes.CDLL(None)
LIBC.getenv.restype = ctypes.c_char_p


@pytest.mark.clause("C16")
def test_c16_native_code_sees_the_variables_and_the_process_does_not():
    before = dict(os.environ)
    with native_environment({"MC_HICACHE_TEST": "7"}):
        assert (LIBC.getenv(b"MC_HICACHE_TEST"), dict(os.environ) == before) == (b"7", True)
    assert (LIBC.getenv(b"MC_HICACHE_TEST"), dict(os.environ) == before) == (None, True)


@pytest.mark.clause("C16")
def test_c16_a_value_that_was_there_comes_back_even_after_an_error(monkeypatch):
    monkeypatch.setenv("MC_HICACHE_TEST", "theirs")
    with pytest.raises(RuntimeError), native_environment({"MC_HICACHE_TEST": "ours"}):
        raise RuntimeError
    assert LIBC.getenv(b"MC_HICACHE_TEST") == b"theirs"


def test_the_users_variable_beats_a_derived_one_and_extra_beats_both(monkeypatch):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "9000")
    derived = {"MC_RPC_TIMEOUT_MS": "2000", "MC_LOG_LEVEL": "ERROR"}
    assert variables_of(derived, {}) == {"MC_LOG_LEVEL": "ERROR"}
    extra = {"MC_RPC_TIMEOUT_MS": 5, "MC_STORE_MEMCPY": True, "enable_ssd_offload": True}
    assert variables_of(derived, extra) == {
        "MC_LOG_LEVEL": "ERROR",
        "MC_RPC_TIMEOUT_MS": "5",
        "MC_STORE_MEMCPY": "1",
    }
