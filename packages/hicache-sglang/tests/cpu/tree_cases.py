"""Every kind of pool and layout through the real trees, in one process; prints one JSON object."""

from __future__ import annotations

import json
import logging
import sys
import tempfile

import sgl_toy
import trees

from hicache_core import StorageBackendFactory

DYNAMIC = {
    "backend_name": "dynamic",
    "module_path": "hicache_sglang",
    "class_name": "HiCacheSGLang",
    "options": sgl_toy.OPTIONS,
}
WAYS = {
    "generic": ("dynamic", DYNAMIC),
    "zero-copy": ("dynamic", DYNAMIC | {"interface_v1": 1}),
    "plugin": ("hicache.toy", {}),
}
KINDS = {
    "mha": ("layer_first", "page_first", "page_first_direct", "page_head"),
    "asymmetric": ("page_first", "page_first_direct"),
    "mla": ("layer_first", "page_first", "page_first_direct"),
    "dsa": ("layer_first", "page_first", "page_first_direct"),
    "mamba": ("page_first", "page_first_direct"),
    "mla_mamba": ("page_first", "page_first_direct"),
}


def main() -> None:
    logging.disable(logging.CRITICAL)
    StorageBackendFactory.register_backend("toy", "sgl_toy", "ToyStore")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    wanted = set(sys.argv[1:])
    found: dict[str, str] = {}
    for kind, layouts in KINDS.items():
        for layout in layouts:
            for way, (backend, extra) in WAYS.items():
                if not wanted or f"{kind} {layout}" in wanted:
                    found[f"{kind} {layout} {way}"] = one(trees.life, kind, layout, backend, extra)
    for way, (backend, extra) in WAYS.items():
        if not wanted or "two ranks" in wanted:
            found[f"two ranks {way}"] = one(trees.two_ranks, "page_first_direct", backend, extra)
    if not wanted or "others" in wanted:
        theirs = {"backend_name": "theirs", "module_path": "sgl_theirs", "class_name": "TheirStore"}
        found["others dynamic"] = one(trees.life, "mha", "page_first", "dynamic", theirs)
        with tempfile.TemporaryDirectory() as folder:
            built_in = {"file_storage_path": folder}
            found["others file"] = one(trees.life, "mha", "page_first", "file", built_in)
    sys.stdout.write("RESULT " + json.dumps(found) + "\n")


def one(case, *arguments) -> str:
    sgl_toy.STORE.clear()
    try:
        return case(*arguments)
    except Exception as error:  # noqa: BLE001 - the outcome is reported, the other cases go on
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
