"""``python -m hicache_conformance NAME``: the check where the ``hicache`` command is not installed."""

from __future__ import annotations

from hicache_conformance.command import check

if __name__ == "__main__":
    check(prog_name="python -m hicache_conformance")
