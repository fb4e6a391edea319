"""Which store a command works on: a backend's options, and a temporary folder where none is named."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hicache_cli.described import options_model, present_values, provider_and_spec
from hicache_core.errors import InvalidOptions
from hicache_core.spec import BackendSpec

#: The option that names a backend's folder, whatever the backend.
ROOT_OPTION = "root"


@dataclass(frozen=True, slots=True)
class Target:
    """A backend and the explicit options to open it with."""

    backend: str
    spec: BackendSpec
    options: Mapping[str, Any]
    temporary_root: str | None
    """The folder that is removed afterwards; None where the user named the place."""

    @property
    def note(self) -> str:
        """What to tell the user about the place, empty when there is nothing to tell."""
        if self.temporary_root is None:
            return ""
        return (
            f"No {ROOT_OPTION} is set for '{self.spec.name}': used the temporary folder "
            f"{self.temporary_root}, which is removed. Choose a place with --option {ROOT_OPTION}=/path."
        )


@contextmanager
def opened_target(
    backend: str, options: Mapping[str, Any], *, capacity: int | None = None
) -> Iterator[Target]:
    """Complete a backend's options for one command; what it made is removed at the end.

    Args:
        backend: an installed name, or ``name@distribution``.
        options: as the user gave them.
        capacity: bytes for the backend's ``capacity`` option; None leaves it alone.

    Raises:
        BackendLoadError: any of its kinds, InvalidOptions where there is no capacity option.
    """
    provider, spec = provider_and_spec(backend)
    model = options_model(provider, spec)
    explicit = dict(options)
    if capacity is not None:
        if "capacity" not in model.model_fields:
            complaint = f"capacity is unknown: '{spec.name}' cannot be limited from here"
            raise InvalidOptions(spec.name, [("capacity", complaint, "--capacity-pages")])
        explicit["capacity"] = capacity
    unset = ROOT_OPTION in model.model_fields and (
        present_values(spec.name, model, explicit)[ROOT_OPTION][1] == "default"
    )
    if not unset:
        yield Target(backend, spec, explicit, None)
        return
    folder = tempfile.mkdtemp(prefix="hicache-")
    try:
        yield Target(backend, spec, explicit | {ROOT_OPTION: folder}, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
