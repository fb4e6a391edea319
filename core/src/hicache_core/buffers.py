"""Raw memory as Python buffers: a view at an address, and the address of a buffer.

ctypes is imported when memory is first looked at, since `import hicache_core`
must stay quick.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hicache_core.errors import InvalidPages


def view_at(address: int, nbytes: int, owner: object) -> memoryview:
    """Look at raw memory; the view, and every slice of it, keeps the owner alive."""
    import ctypes

    memory = (ctypes.c_char * nbytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]  # what a view holds is this object
    return memoryview(memory).cast("B")


def flat_view(buffer: Any) -> memoryview:
    """Look at a buffer as consecutive bytes.

    Raises:
        InvalidPages: it offers no buffer, or not a contiguous one.
    """
    try:
        view = memoryview(buffer)
        return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidPages(
            "memory does not offer one contiguous buffer",
            value=f"{type(buffer).__name__}: {error}",
            remedy="Pass a C-contiguous bytes-like object; for a tensor use HostPool.from_tensor.",
        ) from error


def address_of(view: memoryview) -> int:
    """Find a buffer's address, read-only ones included, through the buffer protocol itself."""
    import ctypes

    raw = _py_buffer()()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(raw), 0)
    try:
        return int(raw.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(raw))


@lru_cache(maxsize=1)
def _py_buffer() -> Any:
    import ctypes

    class PyBuffer(ctypes.Structure):
        # Source: CPython's Py_buffer, stable since 3.0 and part of the limited API since 3.11.
        _fields_ = [
            ("buf", ctypes.c_void_p),
            ("obj", ctypes.py_object),
            ("len", ctypes.c_ssize_t),
            ("itemsize", ctypes.c_ssize_t),
            ("readonly", ctypes.c_int),
            ("ndim", ctypes.c_int),
            ("format", ctypes.c_char_p),
            ("shape", ctypes.c_void_p),
            ("strides", ctypes.c_void_p),
            ("suboffsets", ctypes.c_void_p),
            ("internal", ctypes.c_void_p),
        ]

    return PyBuffer
