"""BackendSpec: everything about a backend that can be known without importing it.

A plugin's entry point in the group ``hicache.backends`` resolves to one of
these, in a module that imports hicache_core and nothing else. Targets are
strings: the storage class, its options (pydantic) and its harness load only
when they are used.

A complete plugin is two short files::

    # hicache_acme/spec.py                      [project.entry-points."hicache.backends"]
    SPEC = BackendSpec(                         acme = "hicache_acme.spec:SPEC"
        name="acme", api=1, target="hicache_acme.storage:AcmeStorage",
        options="hicache_acme.options:AcmeOptions", harness="hicache_acme.harness:AcmeHarness",
        summary="pages on an Acme server", capabilities=Capabilities(deadline="hold"),
    )
    # hicache_acme/storage.py
    class AcmeStorage(HiCacheStorage): spec = SPEC; ...
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hicache_core.capabilities import Capabilities
from hicache_core.errors import InvalidArgument

#: The contract's major version; a plugin built for another one is refused before its code is imported.
API_VERSION = 1

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A module that the backend's native side needs, and how to get it."""

    module: str
    """The import name, for example ``mooncake``."""
    pip: str = ""
    """The whole command that installs it, for example ``pip install 'hicache-nixl[cu12]'``."""
    apt: str = ""
    """The Debian package of a shared library it links against, for example ``libibverbs1``."""
    versions: str = ""
    """The range that was proven, as PEP 440 text, for example ``>=1.5.0``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """A backend's public description; frozen, all text."""

    name: str
    """What users type, ``[a-z][a-z0-9_]{0,31}``."""
    api: int
    """The contract's major version that the target implements."""
    target: str
    """The storage class, as ``package.module:Class``."""
    options: str
    """The pydantic model of its options, as ``package.module:Class``."""
    harness: str = ""
    """What the conformance suite drives, as ``package.module:Class``; empty when there is none."""
    summary: str = ""
    """One line for tables."""
    capabilities: Capabilities = field(default_factory=Capabilities)
    """The most that an opened instance may promise."""
    requires: tuple[Requirement, ...] = ()
    """What must be importable on the machine."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidArgument(
                "a backend's name is not well formed",
                value=repr(self.name),
                remedy=f"Use the pattern {_NAME.pattern}.",
            )
        if type(self.api) is not int:
            raise InvalidArgument(
                f"'api' of backend '{self.name}' is not a version",
                value=repr(self.api),
                remedy=f"Write the contract's major version as an integer, for example api={API_VERSION}.",
            )
        for kind in ("target", "options", "harness"):
            target = getattr(self, kind)
            if kind == "harness" and target == "":
                continue
            if not isinstance(target, str) or not _TARGET.fullmatch(target):
                raise InvalidArgument(
                    f"'{kind}' of backend '{self.name}' is not a target",
                    value=repr(target),
                    remedy='Write "package.module:Class".',
                )
