"""The metadata's HTTP interface: what goes into a request and an answer, for the client and the server alike.

``POST /v1/{namespace}/{verb}`` with a JSON object, answered by JSON. Keys travel as their digests, 32 hex
digits each in one text, which is a third of their length and is what the database holds. Answers of yes and
no are a text of 1 and 0. ``ended`` in any request lists reads that are over, so that letting go costs no
request of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hicache_core.errors import HiCacheError
from hicache_hf3fs.metadata import (
    NO_PAGE,
    PageFileConflict,
    PageFileLabel,
    PageFileUnknown,
    PageRef,
    Written,
    digests_of,
)

PREFIX = "/v1/"
#: In the order of metadata.py.
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
]
#: Requests above this are refused: 100,000 keys take 3 MB.
MAX_BODY_NBYTES = 32 << 20

_DIGEST_NBYTES = 16


def pack_keys(keys: Sequence[str]) -> str:
    """Make the text of keys."""
    return b"".join(digests_of(keys)).hex()


def unpack_keys(text: str) -> list[bytes]:
    """Read it; ValueError where it is none."""
    digests = bytes.fromhex(text)
    if len(digests) % _DIGEST_NBYTES:
        raise ValueError(f"{len(text)} hex digits are no keys")
    return [digests[at : at + _DIGEST_NBYTES] for at in range(0, len(digests), _DIGEST_NBYTES)]


def pack_flags(flags: Sequence[bool]) -> str:
    """Make the text of a column of yes and no."""
    return "".join(["1" if flag else "0" for flag in flags])


def unpack_flags(text: str) -> list[bool]:
    """Read it."""
    return [flag == "1" for flag in text]


def pack_refs(rows: Sequence[Any], rank: str, name_of: Any, corrupt: int) -> dict[str, Any]:
    """Make the answer to a get from the table's rows: columns, and apart what is not as usual.

    ``rows``: (digest, page file, page, bytes, checksum, verdict) or None each.
    """
    pages = [NO_PAGE if row is None else row[2] for row in rows]
    sizes = [0 if row is None else row[3] for row in rows]
    checksums = [None if row is None else row[4] for row in rows]
    answer: dict[str, Any] = {"pages": pages, "checksums": checksums}
    present = {size for size in sizes if size}
    answer["nbytes"] = sizes if len(present) > 1 else present.pop() if present else 0
    names = {file: name_of(file) for file in {row[1] for row in rows if row is not None}}
    if set(names.values()) - {rank}:
        answer["ranks"] = ["" if row is None else names[row[1]] for row in rows]
    bad = [i for i, row in enumerate(rows) if row is not None and row[5] == corrupt]
    return answer | {"corrupt": bad} if bad else answer


def unpack_refs(answer: Mapping[str, Any], rank: str) -> list[PageRef | None]:
    """Read it."""
    pages, checksums, nbytes = answer["pages"], answer["checksums"], answer["nbytes"]
    if isinstance(nbytes, int) and "ranks" not in answer and "corrupt" not in answer:
        return [
            None if page == NO_PAGE else PageRef(rank, page, nbytes, checksum)
            for page, checksum in zip(pages, checksums, strict=True)
        ]
    sizes = [nbytes] * len(pages) if isinstance(nbytes, int) else nbytes
    ranks = answer.get("ranks", [rank] * len(pages))
    bad = set(answer.get("corrupt", ()))
    rows = zip(ranks, pages, sizes, checksums, strict=True)
    return [None if row[1] == NO_PAGE else PageRef(*row, i in bad) for i, row in enumerate(rows)]


def pack_written(written: Sequence[Written]) -> dict[str, Any]:
    """Make the columns of a confirmation."""
    return {
        "keys": pack_keys([page.key for page in written]),
        "pages": [page.page for page in written],
        "nbytes": [page.nbytes for page in written],
        "checksums": [page.checksum for page in written],
    }


def unpack_written(asked: Mapping[str, Any]) -> list[tuple[bytes, int, int, int | None]]:
    """Read them."""
    digests = unpack_keys(asked["keys"])
    return list(zip(digests, asked["pages"], asked["nbytes"], asked["checksums"], strict=True))


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
