"""What upkeep asks of a store: refused unless declared, and manifests that lead back to their identity."""

from __future__ import annotations

import json

import pytest
from core_builders import a_pool
from core_caches import a_cache

from hicache_core import Capabilities, Identity, Namespace, UnsupportedOperation, Verified
from hicache_core.errors import InvalidIdentity


@pytest.mark.clause("C13")
@pytest.mark.parametrize("verb", ["namespaces", "verify"])
def test_c13_upkeep_that_is_not_declared_is_refused_at_the_call(verb: str) -> None:
    with a_cache(None, a_pool()) as cache:
        assert cache.storage is not None
        with pytest.raises(UnsupportedOperation) as caught:
            getattr(cache.storage, verb)()
        assert caught.value.capability == {"namespaces": "listing", "verify": "verify"}[verb]


def test_upkeep_is_not_declared_unless_written() -> None:
    assert (Capabilities().listing, Capabilities().verify) == (False, False)
    assert Capabilities().narrowing_violations(Capabilities(listing=True)) == ["listing: False to True"]


def test_pieces_of_a_verification_add_up() -> None:
    pieces = [Verified(pages=2, bytes=10, damaged=1), Verified(pages=3, bytes=5, damaged=1, removed=1)]
    assert sum(pieces, Verified()) == Verified(pages=5, bytes=15, damaged=2, removed=1)


def test_a_manifest_leads_back_to_its_identity_through_json() -> None:
    identity = Identity.for_tests(config_overrides={"rope": [1, 2.5, None]}, lora="abc", tenant="é")
    manifest = json.loads(json.dumps(identity.manifest()))
    assert Identity.of_manifest(manifest) == identity
    assert Namespace.of(Identity.of_manifest(manifest)) == Namespace.of(identity)


@pytest.mark.parametrize(
    "change", [{"schema": 2}, {"more": 1}, {"model": None}], ids=["schema", "unknown", "not a text"]
)
def test_a_manifest_of_another_kind_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidIdentity):
        Identity.of_manifest(Identity.for_tests().manifest() | change)
    lacking = Identity.for_tests().manifest()
    del lacking["tenant"]
    with pytest.raises(InvalidIdentity, match="not one of this version"):
        Identity.of_manifest(lacking)
