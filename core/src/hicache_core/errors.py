"""The one tree of exceptions: what was attempted, the value met, the remedy.

Every error that hicache raises on purpose is a ``HiCacheError``. A class builds
its own message from fields, so that the same trouble reads the same wherever it
is met and a test can compare fields instead of prose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class HiCacheError(Exception):
    """The base of every hicache error.

    Args:
        what: what was attempted, on which thing; one lower-case sentence.
        value: the value met, as text; empty when there is none. Never a secret.
        remedy: what to type or change; empty only where nothing can be done.
    """

    def __init__(self, what: str, *, value: str = "", remedy: str = "") -> None:
        self.what = what
        self.value = value
        self.remedy = remedy
        super().__init__(what, value, remedy)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Let an error cross processes: a class's own constructor takes other arguments than these."""
        return _restored, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        head = f"{self.what}: {self.value}" if self.value else self.what
        if not self.remedy:
            return head
        return f"{head}{'' if head.endswith(('.', '?', '!')) else '.'} {self.remedy}"


def _restored(kind: type[HiCacheError], args: tuple[Any, ...], fields: dict[str, Any]) -> HiCacheError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


# Misuse: the caller can tell in advance that the call is wrong.


class InvalidArgument(HiCacheError, ValueError):
    """An argument of a public call has a wrong value; nothing was done."""


class InvalidPages(InvalidArgument):
    """Page indices, lengths or memory that do not fit the pool or the call."""


class InvalidKey(InvalidArgument):
    """A page hash or a component name outside its pattern."""


class InvalidIdentity(InvalidArgument):
    """An identity, shard or component that cannot be encoded."""


class StorageNotOpened(HiCacheError):
    """A verb was called before ``open()``."""

    def __init__(self, backend: str) -> None:
        super().__init__(f"'{backend}' is not open", remedy="Call open() before the first verb.")


class StorageClosed(HiCacheError):
    """A verb was called after ``close()``, or in the child of a fork."""

    def __init__(self, backend: str) -> None:
        super().__init__(
            f"'{backend}' is closed", remedy="Create and open a new instance; a closed one stays closed."
        )


class UnsupportedOperation(HiCacheError):
    """A capability that the backend does not declare was asked for."""

    def __init__(self, backend: str, operation: str, *, capability: str) -> None:
        self.backend = backend
        self.operation = operation
        self.capability = capability
        super().__init__(
            f"'{backend}' cannot {operation}: it does not declare '{capability}'",
            remedy="Choose a backend that does: `hicache backends` prints the table.",
        )


# The backend as a whole.


class BackendUnavailable(HiCacheError):
    """The backend cannot be reached or refuses to work."""


class BackendTimeout(BackendUnavailable):
    """The backend gave no answer within the deadline."""


# Loading a backend.


class BackendLoadError(HiCacheError):
    """The base of what can go wrong between a name and an open instance."""

    def __init__(self, backend: str, what: str, *, value: str = "", remedy: str = "") -> None:
        self.backend = backend
        super().__init__(what, value=value, remedy=remedy)


class BackendNotFound(BackendLoadError):
    """No backend of this name is installed or registered."""

    def __init__(
        self,
        backend: str,
        *,
        installed: Sequence[str] = (),
        close: Sequence[str] = (),
        install: str = "",
    ) -> None:
        self.installed = tuple(installed)
        self.close = tuple(close)
        self.install = install
        if install:
            what, remedy = f"'{backend}' is not installed", f"Run: {install}"
        else:
            what = f"no backend named '{backend}'; installed: {', '.join(installed) or 'none'}"
            remedy = f"Did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
            remedy = remedy or "Install a plugin that provides it, or name one that is installed."
        super().__init__(backend, what, remedy=remedy)


class BackendDependencyMissing(BackendLoadError):
    """The plugin is installed, and a module or library that it needs is not."""

    def __init__(self, backend: str, module: str, *, remedy: str) -> None:
        self.module = module
        super().__init__(backend, f"'{backend}' needs '{module}', which is not installed", remedy=remedy)


class BackendImportFailed(BackendLoadError):
    """Importing the plugin's code raised."""

    def __init__(self, backend: str, target: str, cause: BaseException, *, distribution: str = "") -> None:
        self.target = target
        origin = f" of {distribution}" if distribution else ""
        super().__init__(
            backend,
            f"importing '{target}'{origin} for backend '{backend}' failed",
            value=f"{type(cause).__name__}: {cause}",
            remedy=f"Report it to the authors{origin}, or leave it out with HICACHE_BACKENDS_DENY={backend}.",
        )


class BackendIncompatible(BackendLoadError):
    """The plugin speaks another version of the contract, or its native library has a wrong version."""


class BackendConflict(BackendLoadError):
    """One name is provided by several distributions."""

    def __init__(self, backend: str, providers: Sequence[tuple[str, str, str]]) -> None:
        self.providers = tuple(providers)
        listed = "; ".join(f"{dist} {version} ({where})" for dist, version, where in providers)
        names = " or ".join(f"'{backend}@{dist}'" for dist, _, _ in providers)
        super().__init__(
            backend,
            f"'{backend}' is provided by {len(providers)} distributions",
            value=listed,
            remedy=f"Uninstall all but one, or name the one you mean: {names}.",
        )


class BackendBlocked(BackendLoadError):
    """The allow or deny list forbids this backend."""

    def __init__(self, backend: str, *, variable: str, setting: str) -> None:
        self.variable = variable
        super().__init__(
            backend,
            f"'{backend}' is blocked by {variable}",
            value=setting,
            remedy=f"Change {variable} to let it load.",
        )


class InvalidOptions(BackendLoadError):
    """Options that are unknown, malformed or do not fit each other; all at once.

    ``problems`` holds (field, complaint, source) for each, secrets masked.
    """

    def __init__(self, backend: str, problems: Sequence[tuple[str, str, str]]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        subject = f"{count} options of '{backend}' are" if count > 1 else f"1 option of '{backend}' is"
        what = f"{subject} not valid"
        listed = "; ".join(complaint for _, complaint, _ in self.problems)
        sources = ", ".join(dict.fromkeys(source for _, _, source in self.problems if source))
        remedy = f"Set by: {sources}. " if sources else ""
        super().__init__(backend, what, value=listed, remedy=f"{remedy}See: hicache show {backend}")
