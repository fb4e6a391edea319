"""StorageBackendFactory: one path from a name to an open instance.

name -> provider (registry) -> spec -> options -> ``Class(config, options)`` ->
``open(pools)``. Names installed as plugins, registered in process, or given to
``"dynamic"`` all take it; no branch knows a backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hicache_core.errors import (
    BackendDependencyMissing,
    BackendImportFailed,
    BackendIncompatible,
    BackendLoadError,
    HiCacheError,
    InvalidOptions,
)
from hicache_core.memory import HostPool
from hicache_core.registry import INSTALL_HINTS, Listed, Provider, check_allowed, registry
from hicache_core.spec import API_VERSION, BackendSpec
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig

if TYPE_CHECKING:
    from hicache_core.options import Options, Sourced

#: The name under which a class is given whole, without being installed or registered.
DYNAMIC = "dynamic"

#: How the dynamic loader of glibc says that a shared library is not there; ImportError has no field for it.
_NO_LIBRARY = "cannot open shared object file"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A backend whose code is imported and whose options are valid, not yet constructed."""

    spec: BackendSpec
    storage_class: type[HiCacheStorage]
    options: Options
    sources: Mapping[str, str]

    def create(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        """Construct an instance; no I/O.

        Raises:
            BackendIncompatible: the constructor raised.
        """
        try:
            return self.storage_class(config, self.options)
        except HiCacheError:
            raise
        except Exception as error:
            raise BackendIncompatible(
                self.spec.name,
                f"constructing '{self.spec.name}' failed",
                value=f"{type(error).__name__}: {error}",
                remedy="A backend takes (config, options) and keeps them; report it to its authors.",
            ) from error


class StorageBackendFactory:
    """What users and adapters call; all methods are static and thread-safe."""

    @staticmethod
    def register_backend(name: str, module_path: str, class_name: str) -> None:
        """Make a class known by name in this process, without a scan; the class has a ``spec``."""
        registry.register(name, module_path, class_name)

    @staticmethod
    def create_backend(
        name: str,
        config: HiCacheStorageConfig,
        mem_pool_host: HostPool | Iterable[HostPool] = (),
        /,
        **options: Any,
    ) -> HiCacheStorage:
        """Build, open and return a backend.

        Args:
            name: an installed or registered name, ``name@distribution``, or
                ``"dynamic"`` with the options backend_name, module_path, class_name.
            config: namespace, identity, placement, deadline.
            mem_pool_host: one pool or several.
            options: the backend's own; an option may be called ``name`` or ``config``.

        Raises:
            BackendLoadError: any of its kinds; BackendUnavailable, BackendTimeout from open.
        """
        pools = (mem_pool_host,) if isinstance(mem_pool_host, HostPool) else tuple(mem_pool_host)
        storage = StorageBackendFactory.load(name, options).create(config)
        open_storage(storage, pools)
        return storage

    @staticmethod
    def load(name: str, options: Mapping[str, Any]) -> Loaded:
        """Import a backend and validate its options, without constructing it.

        Raises:
            BackendLoadError: any of its kinds.
        """
        remaining = dict(options)
        provider = _dynamic_provider(remaining) if name == DYNAMIC else registry.find(name)
        spec, storage_class = _load_class(provider)
        sourced = _resolve(spec, provider, remaining)
        return Loaded(spec, storage_class, sourced.options, sourced.sources)

    @staticmethod
    def spec(name: str) -> BackendSpec:
        """Import a backend's light module and return its spec, checked against this core's API version.

        Raises:
            BackendLoadError: any of its kinds.
        """
        return load_spec(registry.find(name))

    @staticmethod
    def list() -> Sequence[Listed]:
        """List every installed or registered backend; imports light modules only and never raises."""
        rows = []
        for name in registry.names():
            provider = next(iter(registry.providers(name)), None)
            try:
                provider = registry.find(name)
                rows.append(Listed(name, provider, load_spec(provider), None))
            except BackendLoadError as error:
                rows.append(Listed(name, provider, None, error))
        return rows


def open_storage(storage: HiCacheStorage, pools: Sequence[HostPool]) -> None:
    """Open an instance and hold it to its spec: a backend may narrow its promises, never widen them.

    Raises:
        HiCacheError: whatever open raised; BackendIncompatible when it promises more than declared;
            BackendDependencyMissing when open did not find a module that the spec requires.
    """
    try:
        storage.open(pools)
    except ImportError as error:
        missing, needed_by = _missing(error)
        if _top(needed_by) not in {_top(requirement.module) for requirement in storage.spec.requires}:
            raise
        name = storage.spec.name
        remedy = _install_line(name, missing, needed_by, storage.spec)
        raise BackendDependencyMissing(name, missing, remedy=remedy) from error
    wider = storage.spec.capabilities.narrowing_violations(storage.capabilities)
    if wider:
        storage.close()
        raise BackendIncompatible(
            storage.spec.name,
            f"'{storage.spec.name}' promises more after open than its spec declares",
            value="; ".join(wider),
            remedy="Declare it in the spec, or narrow it in open; report it to the plugin's authors.",
        )


def load_spec(provider: Provider) -> BackendSpec:
    """Import the module that holds a provider's spec and check what it is.

    Raises:
        BackendImportFailed, BackendDependencyMissing, BackendIncompatible.
    """
    if provider.registered:
        return _load_class(provider)[0]
    spec = import_target(provider.target, provider)
    if not isinstance(spec, BackendSpec):
        raise BackendIncompatible(
            provider.name,
            f"the entry point '{provider.name}' of {provider.distribution} is not a BackendSpec",
            value=f"{provider.target} is a {type(spec).__name__}",
            remedy="Point it at a BackendSpec; the docstring of hicache_core.spec shows one.",
        )
    if spec.name != provider.name:
        raise BackendIncompatible(
            provider.name,
            f"the entry point '{provider.name}' of {provider.distribution} gives the spec of another backend",
            value=repr(spec.name),
            remedy="Give both one name: options, variables and the allow list go by it.",
        )
    return _checked(spec, provider)


def import_target(target: str, provider: Provider, spec: BackendSpec | None = None) -> Any:
    """Import ``module:attribute`` of a plugin, telling apart what can go wrong.

    A missing module is told apart by its name, a missing shared library by the
    loader's words: what the plugin needs is BackendDependencyMissing with the
    line to type; anything else that an import raises, an AttributeError inside
    the module or an exit included, is BackendImportFailed.
    """
    module_name, _, attribute = target.partition(":")
    try:
        return attrgetter(attribute)(import_module(module_name))
    except BackendLoadError:
        raise
    except (Exception, SystemExit) as error:
        missing, needed_by = _missing(error)
        if not missing or _top(missing) == _top(module_name):
            raise BackendImportFailed(provider.name, target, error, distribution=_origin(provider)) from error
        remedy = _install_line(provider.name, missing, needed_by, spec)
        raise BackendDependencyMissing(provider.name, missing, remedy=remedy) from error


def _load_class(provider: Provider) -> tuple[BackendSpec, type[HiCacheStorage]]:
    spec = None if provider.registered else load_spec(provider)
    found = import_target(spec.target if spec else provider.target, provider, spec)
    if not (isinstance(found, type) and issubclass(found, HiCacheStorage)):
        raise BackendIncompatible(
            provider.name,
            f"the target of backend '{provider.name}' is not a HiCacheStorage",
            value=f"{spec.target if spec else provider.target}",
            remedy="Derive the class from hicache_core.HiCacheStorage.",
        )
    declared = getattr(found, "spec", None)
    if not isinstance(declared, BackendSpec):
        raise BackendIncompatible(
            provider.name,
            f"class '{found.__module__}.{found.__qualname__}' has no spec",
            remedy="Add to the class:  spec = BackendSpec(name=..., api=1, target=..., options=...)",
        )
    checked = _checked(spec or declared, provider)
    if missing := sorted(found.__abstractmethods__):
        raise BackendIncompatible(
            provider.name,
            f"class '{found.__module__}.{found.__qualname__}' does not implement the contract",
            value=", ".join(missing),
            remedy="Implement what is named; the docstrings of hicache_core.storage say how.",
        )
    return checked, found


def _checked(spec: BackendSpec, provider: Provider) -> BackendSpec:
    if spec.api != API_VERSION:
        older = spec.api < API_VERSION
        fix = f"Run: pip install -U {provider.distribution if older else 'hicache-core'}"
        if older and provider.registered:
            fix = f"Port the class to version {API_VERSION} of the contract, then write that into its spec."
        raise BackendIncompatible(
            provider.name,
            f"'{provider.name}' of {_origin(provider)} speaks version {spec.api} of the contract, "
            f"{'older' if older else 'newer'} than this core's",
            value=f"version {API_VERSION}",
            remedy=fix,
        )
    return spec


def _resolve(spec: BackendSpec, provider: Provider, options: Mapping[str, Any]) -> Sourced:
    from hicache_core.options import Options, resolve

    model = import_target(spec.options, provider, spec)
    if not (isinstance(model, type) and issubclass(model, Options)):
        raise BackendIncompatible(
            provider.name,
            f"the options of backend '{provider.name}' are not an Options model",
            value=spec.options,
            remedy="Derive the model from hicache_core.options.Options.",
        )
    neighbours = () if provider.registered else registry.names()
    try:
        return resolve(spec.name, model, options, neighbours=neighbours)
    except HiCacheError:
        raise
    except Exception as error:
        raise BackendIncompatible(
            provider.name,
            f"the options of backend '{provider.name}' could not be checked",
            value=f"{type(error).__name__}: {error}",
            remedy="Report it to the plugin's authors: a validator raises ValueError for what is not valid.",
        ) from error


def _dynamic_provider(options: dict[str, Any]) -> Provider:
    fields = {name: options.pop(name, None) for name in ("backend_name", "module_path", "class_name")}
    bad = [name for name, value in fields.items() if not (isinstance(value, str) and value)]
    if bad:
        raise InvalidOptions(DYNAMIC, [(name, f"{name} is required, as text", "") for name in bad])
    check_allowed(fields["backend_name"])
    target = f"{fields['module_path']}:{fields['class_name']}"
    return Provider(
        fields["backend_name"], target, "this process", "", fields["module_path"], registered=True
    )


def _missing(error: BaseException) -> tuple[str, str]:
    """Name the module or shared library that an import did not find and the module that needs it, if any."""
    if isinstance(error, ModuleNotFoundError):
        return error.name or "", error.name or ""
    if isinstance(error, ImportError) and _NO_LIBRARY in str(error):
        return str(error).partition(":")[0], error.name or ""
    return "", ""


def _install_line(name: str, missing: str, needed_by: str, spec: BackendSpec | None) -> str:
    for requirement in spec.requires if spec else ():
        if _top(requirement.module) == _top(needed_by):
            lines = [requirement.pip] if requirement.pip else []
            lines += [f"apt-get install {requirement.apt}"] if requirement.apt else []
            if lines:
                return f"Run: {'; '.join(lines)}"
    hint = INSTALL_HINTS.get(name)
    return f"Run: {hint}" if hint else f"Install the distribution that provides '{missing}'."


def _top(module_name: str) -> str:
    return module_name.partition(".")[0]


def _origin(provider: Provider) -> str:
    return f"{provider.distribution} {provider.version}".strip()
