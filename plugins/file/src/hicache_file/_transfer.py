"""Moving page bytes between slots and files, hashing them while they are in the cache; no locks, no state.

A batch moves in chunks of about half a MiB, which stay in a core's second-level
cache between the copy and the hash: hashing all first and moving then costs a
quarter of the throughput. The copy comes first in both directions, since it is
what waits for memory, and it waits without the interpreter's lock, which xxhash
keeps for pages of this size (docs/file-performance.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

#: Bytes moved and hashed at a time.
CHUNK_NBYTES = 512 << 10
#: Bytes moved at a time where nothing is hashed: fewer calls, and enough of them for two threads to share.
PLAIN_CHUNK_NBYTES = 2 << 20
#: Buffers a preadv or pwritev takes. Source: IOV_MAX of Linux.
MAX_BUFFERS = 1024

View = memoryview


class Chunk(NamedTuple):
    """Pages that lie one behind the other in one file."""

    fd: int
    offset: int
    positions: list[int]
    """Of the pages in the batch, in the order of the file."""
    sums: list[int] | None
    """Their checksums; None where there is nothing to compare."""


def pages_per_chunk(nbytes: int, buffers_per_page: int, *, summed: bool) -> int:
    """Tell how many pages of a size make a chunk."""
    most = CHUNK_NBYTES if summed else PLAIN_CHUNK_NBYTES
    return max(1, min(most // nbytes, MAX_BUFFERS // buffers_per_page))


def sum_of(views: Sequence[View]) -> int:
    """Checksum one page."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    hasher = xxhash.xxh3_64()
    for view in views:
        hasher.update(view)
    return hasher.intdigest()


def write_pages(
    fd: int, offset: int, views: Sequence[View], buffers_per_page: int, nbytes: int, sums: list[int] | None
) -> None:
    """Write pages one behind the other; ``sums``, when given, gets a checksum a page.

    Raises:
        OSError: any leading part may have been written.
    """
    if nbytes > CHUNK_NBYTES and sums is not None:
        for start in range(0, len(views), buffers_per_page):
            sums.append(_write_large(fd, offset, views[start : start + buffers_per_page]))
            offset += nbytes
        return
    step = pages_per_chunk(nbytes, buffers_per_page, summed=sums is not None) * buffers_per_page
    for start in range(0, len(views), step):
        chunk = views[start : start + step]
        offset += _write_all(fd, chunk, offset)
        if sums is not None:
            if buffers_per_page == 1:
                sums.extend(map(xxhash.xxh3_64_intdigest, chunk))
            else:
                pages = range(0, len(chunk), buffers_per_page)
                sums.extend([sum_of(chunk[at : at + buffers_per_page]) for at in pages])


def read_chunk(
    chunk: Chunk, views: Sequence[View], buffers_per_page: int, nbytes: int, bad: list[int]
) -> None:
    """Read a chunk into its slots; ``bad`` gets the positions that are short or do not match.

    Raises:
        OSError: the slots of the chunk are undefined.
    """
    fd, offset, positions, sums = chunk
    if nbytes > CHUNK_NBYTES and sums is not None:
        for at, position in enumerate(positions):
            page = views[position * buffers_per_page : (position + 1) * buffers_per_page]
            if _read_large(fd, offset + at * nbytes, page) != sums[at]:
                bad.append(position)
        return
    count = len(positions)
    first = positions[0]
    if positions == list(range(first, first + count)):
        slots = views[first * buffers_per_page : (first + count) * buffers_per_page]
    else:
        spans = [views[p * buffers_per_page : (p + 1) * buffers_per_page] for p in positions]
        slots = [view for span in spans for view in span]
    whole = _read_all(fd, slots, offset, count * nbytes) // nbytes
    bad.extend(positions[whole:])
    if sums is None:
        return
    if buffers_per_page == 1:
        found = list(map(xxhash.xxh3_64_intdigest, slots[:whole]))
    else:
        pages = range(0, whole * buffers_per_page, buffers_per_page)
        found = [sum_of(slots[at : at + buffers_per_page]) for at in pages]
    if found != sums[:whole]:
        bad.extend(p for p, got, want in zip(positions, found, sums, strict=False) if got != want)


def _write_large(fd: int, offset: int, page: Sequence[View]) -> int:
    hasher = xxhash.xxh3_64()
    for piece in _pieces(page):
        offset += _write_all(fd, piece, offset)
        for view in piece:
            hasher.update(view)
    return hasher.intdigest()


def _read_large(fd: int, offset: int, page: Sequence[View]) -> int | None:
    hasher = xxhash.xxh3_64()
    for piece in _pieces(page):
        want = sum(map(len, piece))
        if _read_all(fd, piece, offset, want) != want:
            return None
        for view in piece:
            hasher.update(view)
        offset += want
    return hasher.intdigest()


def _pieces(page: Sequence[View]) -> Iterator[list[View]]:
    """Cut a large page into lists of views of at most a chunk and MAX_BUFFERS each."""
    piece: list[View] = []
    room = CHUNK_NBYTES
    for view in page:
        while len(view):
            head, view = view[:room], view[room:]
            piece.append(head)
            room -= len(head)
            if not room or len(piece) == MAX_BUFFERS:
                yield piece
                piece, room = [], CHUNK_NBYTES
    if piece:
        yield piece


def _write_all(fd: int, views: Sequence[View], offset: int) -> int:
    done = os.pwritev(fd, views, offset)
    want = sum(map(len, views))
    total = done
    while total < want:
        views = _behind(views, done)
        done = os.pwritev(fd, views, offset + total)
        total += done
    return want


def _read_all(fd: int, views: Sequence[View], offset: int, want: int) -> int:
    total = done = os.preadv(fd, views, offset)
    while done and total < want:
        views = _behind(views, done)
        done = os.preadv(fd, views, offset + total)
        total += done
    return total


def _behind(views: Sequence[View], done: int) -> list[View]:
    """Drop what has been moved already."""
    rest = list(views)
    at = 0
    while at < len(rest) and done >= len(rest[at]):
        done -= len(rest[at])
        at += 1
    rest = rest[at:]
    if rest and done:
        rest[0] = rest[0][done:]
    return rest
