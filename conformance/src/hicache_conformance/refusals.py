"""What a backend must refuse, loudly, when it does not declare a capability (C13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hicache_conformance.bench import Site
from hicache_conformance.calls import PATIENCE_S
from hicache_core import Component, HiCacheStorage, Identity, Placement, UnsupportedOperation
from hicache_core.factory import open_storage

_KEY = Component("kv", "whole", "page_first", "bf16", 4096).keys(["absent"])


def _refuses(capability: str, verb: Callable[[HiCacheStorage], Any]) -> Callable[[Site], None]:
    def check(site: Site) -> None:
        storage = site.create(
            Identity.for_tests(tenant=f"refusals-{site.seed}"),
            Placement(),
            PATIENCE_S,
            site.harness.options(),
        )
        open_storage(storage, ())
        try:
            answer = verb(storage)
        except UnsupportedOperation as error:
            if error.capability != capability:
                raise AssertionError(
                    f"C13: the refusal names {error.capability!r}, not {capability!r}"
                ) from error
        else:
            raise AssertionError(
                f"C13: '{capability}' is not declared, and the verb answered {answer!r} quietly"
            )
        finally:
            storage.close()

    return check


#: Capability -> the check of its refusal, for those that a call can ask for.
REFUSALS: dict[str, Callable[[Site], None]] = {
    "remove": _refuses("remove", lambda storage: storage.batch_remove(_KEY)),
    "clear": _refuses("clear", lambda storage: storage.clear()),
    "listing": _refuses("listing", lambda storage: storage.namespaces()),
    "verify": _refuses("verify", lambda storage: storage.verify()),
}
