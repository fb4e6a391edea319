"""The metadata's HTTP interface: what goes into a request and an answer, for the client and the server alike.

``POST /v1/{namespace}/{verb}`` with a JSON object, answered by one. ``ended`` in any request lists reads
that are over, so that letting go costs no request of its own. A row of ``get`` is [page, nbytes, checksum],
and two more where they are not as usual: the page file, and whether it is known to be corrupt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hicache_core.errors import HiCacheError
from hicache_hf3fs.metadata import PageFileConflict, PageFileLabel, PageFileUnknown, PageRef, Written

PREFIX = "/v1/"
VERBS = [
    "initialize",
    "reserve",
    "confirm",
    "get",
    "exists",
    "delete",
    "report_bad",
    "touch",
    "clear",
    "usage",
]  # in the order of metadata.py
#: Requests above this are refused: 10,000 keys of the longest kind take 2 MB.
MAX_BODY_NBYTES = 32 << 20


def pack_refs(refs: Sequence[PageRef | None], rank: str) -> list[Any]:
    """Make the rows of a get."""
    return [
        ref and ([*ref[1:4]] if ref.rank == rank and not ref.corrupt else [*ref[1:4], ref.rank, ref.corrupt])
        for ref in refs
    ]


def unpack_refs(rows: Sequence[Any], rank: str) -> list[PageRef | None]:
    """Read the rows of a get."""
    return [row and (PageRef(rank, *row) if len(row) == 3 else _unusual(row)) for row in rows]


def _unusual(row: Sequence[Any]) -> PageRef:
    page, nbytes, checksum, rank, corrupt = row
    return PageRef(rank, page, nbytes, checksum, corrupt)


def pack_written(written: Sequence[Written]) -> list[list[Any]]:
    """Make the columns of a confirmation."""
    return [list(column) for column in zip(*written, strict=True)] or [[], [], [], []]


def unpack_written(columns: Sequence[Sequence[Any]]) -> list[Written]:
    """Read the columns of a confirmation."""
    return [Written(*row) for row in zip(*columns, strict=True)]


def pack_label(label: PageFileLabel) -> list[Any]:
    """Make a label's fields."""
    return [label.file_id, label.page_nbytes, label.num_pages]


def pack_error(error: HiCacheError) -> dict[str, Any]:
    """Make the answer that stands for an error."""
    answer = {"what": error.what, "value": error.value, "remedy": error.remedy}
    if isinstance(error, PageFileUnknown):
        answer["rank"] = error.rank
    if isinstance(error, PageFileConflict):
        return answer | {"known": pack_label(error.known), "met": pack_label(error.met)}
    return answer


def unpack_error(status: int, answer: Mapping[str, Any], rank: str) -> HiCacheError | None:
    """Give the error that an answer stands for; None where it is none of these."""
    if status == 404 and "rank" in answer:
        return PageFileUnknown(answer["rank"])
    if status == 409 and "known" in answer:
        return PageFileConflict(rank, PageFileLabel(*answer["known"]), PageFileLabel(*answer["met"]))
    return None
