"""The master's HTTP side: which objects there are, and how full the store is.

The native client cannot list. Source: the paths of mooncake_master 0.3.13.post1;
asking them grants no lease, so counting pages does not keep them from eviction.
"""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterable

from hicache_core import BackendUnavailable, Usage

#: The only one whose objects can be listed.
DEFAULT_TENANT = "default"


class Admin:
    """Questions to one master's metrics port."""

    def __init__(self, address: str, timeout_s: float, tenant: str = DEFAULT_TENANT) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._tenant = tenant
        # A proxy meant for the internet does not lead to a master.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def usage(self, prefix: str) -> Usage:
        """Count the objects under a prefix and tell the store's size.

        All pages of one component have one size, so one of each is asked for.

        Raises: BackendUnavailable.
        """
        kinds: dict[str, list[str]] = {}
        for name in self.names(prefix):
            kinds.setdefault(name.partition(".")[2], []).append(name)
        pages = nbytes = 0
        for names in kinds.values():
            pages += len(names)
            nbytes += len(names) * self._size_of_one(names)
        metrics = self._metrics(("master_allocated_bytes", "master_total_capacity_bytes"))
        store_bytes = int(metrics.get("master_allocated_bytes", 0))
        capacity = int(metrics.get("master_total_capacity_bytes", 0)) or None
        return Usage(pages, nbytes, max(store_bytes, nbytes), capacity)

    def names(self, prefix: str) -> list[str]:
        """List the objects under a prefix that can be read.

        Raises: BackendUnavailable.
        """
        if self._tenant != DEFAULT_TENANT and self._separates_tenants():
            raise BackendUnavailable(
                f"mooncake_master does not list the objects of tenant '{self._tenant}'",
                value="it was started with --enable_multi_tenants",
                remedy=f"Use tenant='{DEFAULT_TENANT}': namespaces keep users apart as well.",
            )
        return [name for name in self._get("/get_all_keys").splitlines() if name.startswith(prefix)]

    def segments(self) -> list[str]:
        """Name the segments that clients have given to the store.

        Raises: BackendUnavailable.
        """
        return self._get("/get_all_segments").split()

    def _size_of_one(self, names: Iterable[str]) -> int:
        for name in names:
            text = self._get(f"/batch_query_keys?keys={urllib.parse.quote(name, safe='')}")
            replicas = json.loads(text)["data"].get(name, {})
            for kind in ("values", "disk_values", "local_disk_values", "nof_values"):
                for replica in replicas.get(kind) or ():
                    if replica.get("size_"):
                        return int(replica["size_"])
        return 0

    def _metrics(self, wanted: Iterable[str]) -> dict[str, float]:
        found = {}
        for line in self._get("/metrics").splitlines():
            name, _, value = line.partition(" ")
            if name in wanted:
                found[name] = float(value)
        return found

    def _separates_tenants(self) -> bool:
        """Tell whether the master keeps tenants apart; without, it takes all of them for the default one."""
        try:
            self._read("/api/v1/tenant_quotas")
        except (OSError, ValueError):
            return False
        return True

    def _get(self, path: str) -> str:
        try:
            return self._read(path)
        except (OSError, ValueError) as error:
            raise BackendUnavailable(
                f"the metrics of mooncake_master at {self._address} cannot be read",
                value=str(error),
                remedy="Correct the option metrics (HOST:PORT, as its --metrics_port says).",
            ) from error

    def _read(self, path: str) -> str:
        with self._opener.open(f"http://{self._address}{path}", timeout=self._timeout_s) as answer:
            return str(answer.read().decode())
