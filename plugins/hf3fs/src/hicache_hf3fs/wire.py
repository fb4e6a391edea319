"""The metadata's HTTP interface: what goes into a request and an answer, for the client and the server alike.

``POST /v1/{namespace}/{verb}`` with a JSON object, answered by JSON. Keys travel as their digests, 32 hex
digits each in one text, which is a third of their length and is what the database holds. Checksums are one
text too, 16 hex digits each. Answers of yes and no are a text of 1 and 0. ``ended`` in any request lists
reads that are over, so that letting go costs no request of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from hicache_core.errors import HiCacheError
from hicache_hf3fs.metadata import (
    NO_PAGE,
    PageFileConflict,
    PageFileLabel,
    PageFileUnknown,
    PageRef,
    Reservation,
    Terms,
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

#: What sqlite keeps.
MOST = (1 << 63) - 1
#: A byte a page is held in memory.
_MOST_PAGES = 1 << 30

_DIGEST_NBYTES = 16
_CHECKSUM_NBYTES = 8
#: In the place of a checksum that is not there; a real one has 63 bits.
_NO_CHECKSUM = -1


def pack_keys(keys: Sequence[str]) -> str:
    """Make the text of keys."""
    return b"".join(digests_of(keys)).hex()


def number(value: Any, most: int = MOST) -> int:
    """Give a whole number from 0 to ``most`` as it came; ValueError where it is none."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no number from 0 to {most}")
    return value


def numbers(values: Any, least: int = 0) -> list[int]:
    """Do so for a column of them, from ``least`` on."""
    if type(values) is not list or (values and (set(map(type, values)) != {int})):
        raise ValueError("a column of numbers holds something else")
    if values and not least <= min(values) <= max(values) <= MOST:
        raise ValueError(f"numbers from {least} on are wanted, not {min(values)} to {max(values)}")
    return values


def unpack_keys(text: str) -> list[bytes]:
    """Read it; ValueError where it is none."""
    digests = bytes.fromhex(text)
    if len(digests) % _DIGEST_NBYTES:
        raise ValueError(f"{len(text)} hex digits are no keys")
    return [digests[at : at + _DIGEST_NBYTES] for at in range(0, len(digests), _DIGEST_NBYTES)]


def pack_flags(flags: Sequence[bool]) -> str:
    """Make the text of a column of yes and no."""
    return "".join(["1" if flag else "0" for flag in flags])


def unpack_flags(text: str, count: int) -> list[bool]:
    """Read it; ValueError where it is no such text of ``count``."""
    if len(text) != count or set(text) - {"0", "1"}:
        raise ValueError(f"{text!r} is not yes or no {count} times")
    return [flag == "1" for flag in text]


def pack_checksums(checksums: Sequence[int | None]) -> str:
    """Make the text of a column of checksums: as JSON's numbers they cost a get of 128 keys 0.03 ms more."""
    numbers = [_NO_CHECKSUM if checksum is None else checksum for checksum in checksums]
    return struct.pack(f">{len(numbers)}q", *numbers).hex()


def unpack_checksums(text: str) -> list[int | None]:
    """Read it; ValueError where it is none."""
    packed = bytes.fromhex(text)
    if len(packed) % _CHECKSUM_NBYTES:
        raise ValueError(f"{len(text)} hex digits are no checksums")
    numbers = struct.unpack(f">{len(packed) // _CHECKSUM_NBYTES}q", packed)
    return [None if number == _NO_CHECKSUM else number for number in numbers]


def pack_refs(rows: Sequence[Any], rank: str, name_of: Any, corrupt: int) -> dict[str, Any]:
    """Make the answer to a get from the table's rows: columns, and apart what is not as usual.

    ``rows``: (digest, page file, page, bytes, checksum, verdict) or None each.
    """
    pages = [NO_PAGE if row is None else row[2] for row in rows]
    sizes = [0 if row is None else row[3] for row in rows]
    checksums = [None if row is None else row[4] for row in rows]
    answer: dict[str, Any] = {"pages": pages, "checksums": pack_checksums(checksums)}
    present = {size for size in sizes if size}
    answer["nbytes"] = sizes if len(present) > 1 else present.pop() if present else 0
    names = {file: name_of(file) for file in {row[1] for row in rows if row is not None}}
    if set(names.values()) - {rank}:
        answer["ranks"] = ["" if row is None else names[row[1]] for row in rows]
    bad = [i for i, row in enumerate(rows) if row is not None and row[5] == corrupt]
    return answer | {"corrupt": bad} if bad else answer


def unpack_refs(answer: Mapping[str, Any], rank: str, count: int) -> list[PageRef | None]:
    """Read it; ValueError where it is none to ``count`` keys."""
    pages, checksums = _places(answer["pages"], count), unpack_checksums(answer["checksums"])
    nbytes = answer["nbytes"]
    sizes = [nbytes] * count if isinstance(nbytes, int) else nbytes
    ranks = [name and unpack_rank(name) for name in answer["ranks"]] if "ranks" in answer else [rank] * count
    corrupt = [False] * count
    for position in answer.get("corrupt", ()):
        corrupt[position] = True
    refs = map(PageRef._make, zip(ranks, pages, sizes, checksums, corrupt, strict=True))
    return [None if ref.page == NO_PAGE else ref for ref in refs]


def pack_written(written: Sequence[Written]) -> dict[str, Any]:
    """Make the columns of a confirmation."""
    return {
        "keys": pack_keys([page.key for page in written]),
        "pages": [page.page for page in written],
        "nbytes": [page.nbytes for page in written],
        "checksums": pack_checksums([page.checksum for page in written]),
    }


def unpack_written(asked: Mapping[str, Any]) -> list[tuple[bytes, int, int, int | None]]:
    """Read them; ValueError where they are none."""
    digests = unpack_keys(asked["keys"])
    checksums = unpack_checksums(asked["checksums"])
    pages, nbytes = numbers(asked["pages"], NO_PAGE), numbers(asked["nbytes"])
    return list(zip(digests, pages, nbytes, checksums, strict=True))


def pack_label(label: PageFileLabel) -> list[Any]:
    """Make a label's fields."""
    return [label.file_id, label.page_nbytes, label.num_pages]


def unpack_label(fields: Any) -> PageFileLabel:
    """Read them; ValueError where they are no label's."""
    file_id, page_nbytes, num_pages = fields
    if len(bytes.fromhex(file_id)) != 16 or not number(page_nbytes) or not number(num_pages, _MOST_PAGES):
        raise ValueError(f"{fields!r} is not the label of a page file")
    number(page_nbytes * num_pages)
    return PageFileLabel(file_id, page_nbytes, num_pages)


def unpack_rank(name: Any) -> str:
    """Read the name of a page file, which becomes a part of a path; ValueError where it is none."""
    if not isinstance(name, str) or not 0 < len(name.encode()) < 250 or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a page file")
    return name


def unpack_terms(answer: Any) -> Terms:
    """Read the answer to an initialisation; ValueError where it is none."""
    lease_s, hold_s, database = answer
    if not (0 < lease_s < inf and 0 < hold_s < inf and len(bytes.fromhex(database)) == 16):
        raise ValueError(f"{answer!r} are no terms")
    return Terms(float(lease_s), float(hold_s), database.lower())


def unpack_reservations(answer: Any, count: int) -> list[Reservation]:
    """Read the answer to a reservation of ``count`` keys; ValueError where it is none."""
    flags, pages = unpack_flags(answer["existed"], count), _places(answer["pages"], count)
    return list(map(Reservation, flags, pages))


def _places(pages: Any, count: int) -> list[int]:
    if len(numbers(pages, NO_PAGE)) != count:
        raise ValueError(f"the places of {len(pages)} pages, {count} are wanted")
    return list(pages)


def pack_error(error: HiCacheError) -> dict[str, Any]:
    """Make the answer that stands for an error."""
    answer = {"what": error.what, "value": error.value, "remedy": error.remedy}
    if isinstance(error, PageFileUnknown):
        answer["rank"] = error.rank
    if isinstance(error, PageFileConflict):
        return answer | {
            "known": pack_label(error.known),
            "met": pack_label(error.met),
            "owner": error.owner,
        }
    return answer


def unpack_error(status: int, answer: Mapping[str, Any], rank: str) -> HiCacheError | None:
    """Give the error that an answer stands for; None where it is none of these."""
    if status == 404 and "rank" in answer:
        return PageFileUnknown(answer["rank"])
    if status == 409 and "known" in answer:
        try:
            known, met = unpack_label(answer["known"]), unpack_label(answer["met"])
            return PageFileConflict(rank, known, met, str(answer.get("owner", "")))
        except (ValueError, TypeError, KeyError):  # of another kind of server
            return None
    return None
