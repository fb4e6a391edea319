"""Stand-ins for what SGLang imports and a machine without a GPU does not have.

SGLang imports kernels (triton, sgl_kernel) and image codecs at start, even where
nothing of them is called. For names listed in HICACHE_CPU_STAND_INS that no real
package provides, an empty module stands in: its names exist, its decorators
decorate nothing, and giving a tensor to one of its functions is an error.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types


class _Named(type):
    """A class of which any attribute exists: enumerations, constants."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(types.ModuleType):
    """A module, a function and a decorator at once; names in capitals are classes."""

    __path__ = ()
    __version__ = "9.9.9"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            made = _Named(name, (), {"__module__": self.__name__, "__init__": lambda self, *_, **__: None})
        else:
            made = _StandIn(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *arguments, **named):
        if any(type(value).__name__ in ("Tensor", "Parameter") for value in (*arguments, *named.values())):
            raise RuntimeError(f"{self.__name__} has no CPU form, and was called with a tensor")
        if len(arguments) == 1 and not named and callable(arguments[0]):
            return arguments[0]
        return lambda decorated: decorated

    def __getitem__(self, key):
        return self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, so a real package always wins."""

    names = frozenset(filter(None, os.environ.get("HICACHE_CPU_STAND_INS", "").split(",")))

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
