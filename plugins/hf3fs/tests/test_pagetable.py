"""The page table against a dictionary, and its parts one by one."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing

import pytest
from hf3fs_builders import NBYTES, keys_of, soon
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hicache_core import Status
from hicache_core.errors import BackendIncompatible, BackendUnavailable
from hicache_hf3fs import _pagetable
from hicache_hf3fs._clock import Clock, Holds, Leases
from hicache_hf3fs._pagetable import PageTable
from hicache_hf3fs._recent import Recent
from hicache_hf3fs._schema import connect, inconsistencies
from hicache_hf3fs.metadata import NO_PAGE, MetadataUsage, PageFileLabel, PageRef, Terms, digests_of
from hicache_hf3fs.metadata_local import LocalMetadata

PAGES = 12
LABEL = PageFileLabel("a" * 32, NBYTES, PAGES)
#: So few that a handful of random reservations has used them up.
FEW = PageFileLabel("a" * 32, NBYTES, 5)
OTHER = PageFileLabel("b" * 32, 2 * NBYTES, PAGES)
TERMS = Terms(lease_s=60.0, hold_s=15.0)


def a_table(path, *, now=0.0, after_crash=False, label=LABEL) -> PageTable:
    table = PageTable(str(path), TERMS, now=now, after_crash=after_crash)
    table.initialize("kv", label)
    return table


def stored(
    table, keys, *, rank="kv", namespace="n", now=0.0, lease=1, nbytes=NBYTES, checksum=7
) -> list[int]:
    taken = table.reserve(rank, namespace, digests_of(keys), lease, now)
    new = [(key, r.page) for key, r in zip(keys, taken, strict=True) if not r.existed]
    table.confirm(rank, namespace, rows_of(new, nbytes, checksum), [], lease)
    return [r.page for r in taken]


def refs(table, keys, *, namespace="n", now=0.0) -> list[PageRef | None]:
    found = table.find(namespace, digests_of(keys), 99, now)
    table.end_read(99)
    return [row and table.ref(row) for row in found]


def rows_of(pages, nbytes=NBYTES, checksum=7) -> list[tuple[bytes, int, int, int | None]]:
    """Make what a confirmation takes, of (key, page) pairs."""
    digests = digests_of([key for key, _ in pages])
    return [(digest, page, nbytes, checksum) for digest, (_, page) in zip(digests, pages, strict=True)]


class TableMachine(RuleBasedStateMachine):
    """Random verbs on a table, beside a dictionary of what must be stored, and what gets have said of it."""

    KEYS = keys_of(20)
    batches = st.lists(st.integers(0, 19), min_size=1, max_size=6)
    namespaces = st.sampled_from(["n", "m"])

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="hicache-hf3fs-table-")
        self.path = f"{self.folder.name}/m.sqlite"
        self.now, self.tickets = 0.0, 0
        self.table = a_table(self.path, label=FEW)
        self.table._recent._generation = 4  # so that both generations and what lies beyond them are met
        self.pages: dict[tuple[str, str], int] = {}
        self.verdicts: dict[tuple[str, str], Status] = {}
        self.holding: dict[int, set[int]] = {}
        self.reserved: dict[int, tuple[str, list[str], list[int], float]] = {}

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    @rule(batch=batches, namespace=namespaces)
    def reserve(self, batch, namespace) -> None:
        keys, lease = [self.KEYS[i] for i in batch], self.ticket()
        found = self.table.reserve("kv", namespace, digests_of(keys), lease, self.now)
        taken = [r.page for r in found if not r.existed and r.page != NO_PAGE]
        assert len(set(taken)) == len(taken)
        for ticket, held in self.holding.items():
            assert not held & set(taken), f"a page that read {ticket} holds was given away"
        for _, _, pages, end in self.reserved.values():
            assert end <= self.now or not set(pages) & set(taken), "a page was given to two writers"
        for key, reservation in zip(keys, found, strict=True):
            if reservation.existed:
                assert self.pages[namespace, key] == reservation.page
                assert self.verdicts.pop((namespace, key), None) is not Status.CORRUPT
        self.lose({name for name, page in self.pages.items() if page in taken})
        wanted = [key for key, r in zip(keys, found, strict=True) if not r.existed and r.page != NO_PAGE]
        self.reserved[lease] = (namespace, wanted, taken, self.now + TERMS.lease_s)

    @rule(data=st.data(), keep=st.booleans())
    def confirm(self, data, keep) -> None:
        if not self.reserved:
            return
        lease = data.draw(st.sampled_from(sorted(self.reserved)))
        namespace, keys, pages, end = self.reserved.pop(lease)
        written = list(zip(keys, pages, strict=True)) if keep else []
        kept = self.table.confirm("kv", namespace, rows_of(written), [] if keep else pages, lease)
        for (key, page), ok in zip(written, kept, strict=True):
            assert ok or end <= self.now
            if ok and self.verdicts.pop((namespace, key), None) is Status.CORRUPT:
                self.pages[namespace, key] = page
            elif ok:
                self.pages.setdefault((namespace, key), page)

    def lose(self, names: set[tuple[str, str]]) -> None:
        for name in names:
            del self.pages[name]
            self.verdicts.pop(name, None)

    @rule(batch=batches, namespace=namespaces, hold=st.booleans())
    def get(self, batch, namespace, hold) -> None:
        keys, ticket = [self.KEYS[i] for i in batch], self.ticket()
        found = self.table.find(namespace, digests_of(keys), ticket, self.now)
        refs = [row and self.table.ref(row) for row in found]
        pages = [ref and ref.page for ref in refs]
        assert pages == [self.pages.get((namespace, key)) for key in keys]
        bad = [self.verdicts.get((namespace, key)) is Status.CORRUPT for key in keys]
        assert [ref is not None and ref.corrupt for ref in refs] == bad
        if hold:
            self.holding[ticket] = {page for page in pages if page is not None}
        else:
            self.table.end_read(ticket)

    @rule(batch=batches, namespace=namespaces)
    def exists(self, batch, namespace) -> None:
        names = [(namespace, self.KEYS[i]) for i in batch]
        wanted = [name in self.pages and name not in self.verdicts for name in names]
        assert self.table.exists(namespace, digests_of([key for _, key in names])) == wanted

    @rule(
        data=st.data(), namespace=namespaces, verdict=st.sampled_from([Status.CORRUPT, Status.SIZE_MISMATCH])
    )
    def report_bad(self, data, namespace, verdict) -> None:
        keys = [key for space, key in sorted(self.pages) if space == namespace]
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        (digest,), (row,) = digests_of([key]), self.table.find(namespace, digests_of([key]), 0, self.now)
        self.table.end_read(0)
        self.table.report_bad(namespace, [(digest, self.table.ref(row), verdict)])
        self.verdicts[namespace, key] = verdict

    @rule()
    def end_reads(self) -> None:
        for ticket in self.holding:
            self.table.end_read(ticket)
        self.holding.clear()

    @rule(batch=batches, namespace=namespaces)
    def delete(self, batch, namespace) -> None:
        keys = [self.KEYS[i] for i in batch]
        wanted = [(namespace, key) in self.pages and key not in keys[:i] for i, key in enumerate(keys)]
        assert self.table.delete(namespace, digests_of(keys)) == wanted
        self.lose({name for name in self.pages if name[0] == namespace and name[1] in keys})

    @rule(namespace=namespaces)
    def clear(self, namespace) -> None:
        mine = {name for name in self.pages if name[0] == namespace}
        assert self.table.clear(namespace) == len(mine)
        self.lose(mine)

    @rule(seconds=st.sampled_from([1.0, 16.0, 61.0]))
    def wait(self, seconds) -> None:
        self.now += seconds
        if seconds > TERMS.hold_s:
            self.holding.clear()

    @rule()
    def crash(self) -> None:
        """Abandon the table without closing it, as kill -9 does, and open the database again."""
        self.abandoned = self.table
        self.table = a_table(self.path, now=self.now, after_crash=True, label=FEW)
        self.table._recent._generation = 4
        for lease, (namespace, keys, pages, end) in self.reserved.items():
            if end > self.now:  # runs anew, in full
                self.reserved[lease] = (namespace, keys, pages, self.now + TERMS.lease_s)
        self.now += TERMS.hold_s  # the holds of the earlier life
        self.holding.clear()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        with closing(sqlite3.connect(self.path)) as base:
            assert inconsistencies(base) == []
        for namespace in ("n", "m"):
            mine = sum(name[0] == namespace for name in self.pages)
            assert self.table.usage(namespace)[:2] == (mine, mine * NBYTES)

    def teardown(self) -> None:
        self.table.close()
        self.folder.cleanup()


# A reservation whose confirmation comes after its lease may find its pages gone or still there: both are
# told.
TableMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTableMachine = TableMachine.TestCase


def test_a_lease_that_ended_confirms_nothing_that_was_given_away(tmp_path):
    table = a_table(tmp_path / "m.sqlite")
    pages = [r.page for r in table.reserve("kv", "n", digests_of(keys_of(PAGES)), 1, 0.0)]
    assert sorted(stored(table, keys_of(PAGES, "later"), now=61.0, lease=2)) == sorted(pages)
    written = rows_of([(k, p) for k, p in zip(keys_of(PAGES), pages, strict=True)])
    assert table.confirm("kv", "n", written, [], 1) == [False] * PAGES
    assert table.exists("n", digests_of(keys_of(PAGES))) == [False] * PAGES
    table.close()


def test_a_lease_that_ended_still_confirms_pages_that_nobody_took(tmp_path):
    table = a_table(tmp_path / "m.sqlite")
    (taken,) = table.reserve("kv", "n", digests_of(keys_of(1)), 1, 0.0)
    assert table.confirm("kv", "n", rows_of([(keys_of(1)[0], taken.page)]), [], 1) == [True]
    table.close()


def test_a_repeated_request_takes_no_second_page(tmp_path):
    table = a_table(tmp_path / "m.sqlite")
    for _ in range(3):
        table.reserve("kv", "n", digests_of(keys_of(4)), 1, 0.0)
    assert table.counts()["pages_reserved"] == 4
    written = rows_of([(k, r.page) for k, r in zip(keys_of(4), _again(table), strict=True)])
    assert [table.confirm("kv", "n", written, [], 1) for _ in range(3)] == [[True] * 4] * 3
    assert table.usage("n") == MetadataUsage(4, 4 * NBYTES, 4 * NBYTES, 1)
    table.close()


def _again(table):
    return table.reserve("kv", "n", digests_of(keys_of(4)), 1, 0.0)


def test_what_a_reservation_reports_as_stored_makes_no_room_for_its_rest(tmp_path):
    table = a_table(tmp_path / "m.sqlite")
    stored(table, keys_of(PAGES))
    found = table.reserve("kv", "n", digests_of([*keys_of(PAGES)[:6], *keys_of(10, "new")]), 2, 0.0)
    assert [r.existed for r in found] == [True] * 6 + [False] * 10
    assert [r.page == NO_PAGE for r in found[6:]] == [False] * 6 + [True] * 4
    assert table.exists("n", digests_of(keys_of(PAGES)[:6])) == [True] * 6
    table.close()


def test_a_page_found_corrupt_is_not_contained_and_the_next_set_replaces_it(tmp_path):
    table = a_table(tmp_path / "m.sqlite")
    keys = keys_of(2)
    stored(table, keys)
    (ref, _) = refs(table, keys)
    table.report_bad("n", [(*digests_of(keys[:1]), ref, Status.CORRUPT)])
    assert table.exists("n", digests_of(keys)) == [False, True]
    assert refs(table, keys)[0] == ref._replace(corrupt=True)
    stored(table, keys[:1], lease=2, checksum=8)
    assert refs(table, keys)[0].checksum == 8
    assert table.exists("n", digests_of(keys)) == [True, True]
    table.report_bad("n", [(*digests_of(keys[:1]), ref, Status.CORRUPT)])
    assert table.exists("n", digests_of(keys)) == [True, True], (
        "a report about a page that was replaced counts no more"
    )
    table.close()


def test_a_page_of_another_size_is_replaced_by_a_set_and_not_by_the_size_it_has(tmp_path):
    table = a_table(tmp_path / "m.sqlite")
    table.initialize("large", OTHER)
    keys = keys_of(1)
    stored(table, keys)
    (ref,) = refs(table, keys)
    table.report_bad("n", [(*digests_of(keys[:1]), ref, Status.SIZE_MISMATCH)])
    assert table.exists("n", digests_of(keys)) == [False]
    assert table.reserve("kv", "n", digests_of(keys), 2, 0.0) == [(True, ref.page)]
    assert table.exists("n", digests_of(keys)) == [True]
    stored(table, keys, rank="large", nbytes=2 * NBYTES, lease=3)
    assert [(r.rank, r.nbytes) for r in refs(table, keys)] == [("large", 2 * NBYTES)]
    assert table.usage("n") == MetadataUsage(1, 2 * NBYTES, 2 * NBYTES, 2)
    table.close()


def test_a_server_that_was_killed_gives_out_no_old_page_before_its_reads_have_ended(tmp_path):
    path = tmp_path / "m.sqlite"
    table = a_table(path)
    pages = stored(table, keys_of(8))
    table.delete("n", digests_of(keys_of(8)[:4]))
    table = a_table(path, now=100.0, after_crash=True)
    early = table.reserve("kv", "n", digests_of(keys_of(PAGES, "early")), 5, 101.0)
    assert {r.page for r in early} == {*range(8, PAGES), NO_PAGE}
    late = table.reserve("kv", "n", digests_of(keys_of(8, "late")), 6, 116.0)
    assert sorted(r.page for r in late) == sorted(pages)
    table.close()


def test_pages_that_became_free_are_given_out_once(tmp_path):
    table = a_table(tmp_path / "m.sqlite")
    stored(table, keys_of(PAGES))
    table.delete("n", digests_of(keys_of(6)))
    first, second = (stored(table, keys_of(3, label), lease=9) for label in ("first", "second"))
    assert not set(first) & set(second)
    assert table.counts()["evicted_total"] == 0
    table.close()
    with closing(sqlite3.connect(tmp_path / "m.sqlite")) as base:
        assert inconsistencies(base) == []


def test_a_cleared_namespace_gives_its_pages_back_as_they_are_needed(tmp_path):
    table = a_table(tmp_path / "m.sqlite")
    stored(table, keys_of(8), namespace="n")
    stored(table, keys_of(4), namespace="m")
    assert table.clear("n") == 8
    assert NO_PAGE not in stored(table, keys_of(8, "new"), namespace="n", lease=2)
    assert table.exists("m", digests_of(keys_of(4))) == [True] * 4
    assert table.counts()["evicted_total"] == 0
    table.close()


def test_metadata_of_another_version_is_refused_with_the_remedy(tmp_path):
    path = str(tmp_path / "m.sqlite")
    with closing(sqlite3.connect(path)) as base:
        base.execute("PRAGMA user_version=9")
    with pytest.raises(BackendIncompatible) as caught:
        connect(path)
    assert "version 9" in str(caught.value)
    assert "pip install -U hicache-hf3fs" in str(caught.value)


def test_a_file_that_is_no_database_is_unavailable(tmp_path):
    path = tmp_path / "m.sqlite"
    path.write_bytes(b"not a database at all" * 400)
    with pytest.raises(BackendUnavailable) as caught:
        connect(str(path))
    assert "start with a new database" in str(caught.value)


@pytest.mark.parametrize("again", [False, True], ids=["new", "stored by another meanwhile"])
def test_all_or_part_of_a_lease_may_be_confirmed(tmp_path, again):
    """The first of two writers keeps a key; the second's page for it is free again, its others are stored."""
    table = a_table(tmp_path / "m.sqlite")
    keys = keys_of(4)
    pages = [r.page for r in table.reserve("kv", "n", digests_of(keys), 1, 0.0)]
    if again:
        assert stored(table, keys[1:2], lease=2, checksum=8) == [4]
    written = rows_of(list(zip(keys, pages, strict=True)))
    assert table.confirm("kv", "n", written, [], 1) == [True] * 4
    own = PageRef("kv", 1, NBYTES, 7)
    assert refs(table, keys)[1] == (PageRef("kv", 4, NBYTES, 8) if again else own)
    assert [ref and ref.page for ref in refs(table, keys)] == [0, 4 if again else 1, 2, 3]
    assert table.counts()["pages_reserved"] == 0
    assert table.usage("n") == MetadataUsage(4, 4 * NBYTES, 4 * NBYTES, 1)
    assert inconsistencies(table._base) == []
    table.close()


def test_a_confirmed_row_is_remembered_only_as_long_as_the_database_has_it(tmp_path):
    table = a_table(tmp_path / "m.sqlite")
    keys = keys_of(PAGES)
    stored(table, keys)
    assert len(table._recent) == PAGES
    table.delete("n", digests_of(keys[:1]))
    stored(table, keys_of(2, "new"), lease=2)
    fresh = [row is not None for row in table.find("n", digests_of(keys), 9, 0.0)]
    on_disk = {row[0] for row in table._base.execute("SELECT key FROM page")}
    assert fresh == [digest in on_disk for digest in digests_of(keys)]
    assert fresh.count(False) == 2
    table.close()


def test_the_clock_gives_each_used_page_a_second_chance_and_ends():
    clock = Clock(6)
    clock.use(1)
    clock.use(4)
    clock.take(5, 6)
    assert list(clock.victims()) == [0, 2, 3, 1, 4]
    assert list(clock.victims()) == []
    clock.settle([2])
    assert list(clock.victims()) == [2]
    for index in (3, 4):
        clock.take(index, index + 1)
    clock.take_ahead(3)
    clock.settle([3, 4])
    assert list(clock.victims()) == [4, 3]


def test_a_page_set_where_one_became_free_is_not_the_next_to_be_evicted(tmp_path):
    """The page may lie just before the hand, which would take what was set a moment ago."""
    table = a_table(tmp_path / "m.sqlite")
    keys = keys_of(PAGES)
    stored(table, keys)
    assert stored(table, keys_of(2, "new"), lease=2) == [0, 1]
    table.delete("n", digests_of(keys[3:4]))
    assert stored(table, keys_of(1, "freed"), lease=3) == [3]
    assert stored(table, keys_of(2, "next"), lease=4) == [2, 4]
    assert table.exists("n", digests_of(keys_of(1, "freed"))) == [True]
    table.close()


def test_holds_count_readers_and_end_by_themselves():
    holds = Holds(15.0)
    holds.begin(1, [(7, 0), (7, 1)], 0.0)
    holds.begin(2, [(7, 1)], 10.0)
    holds.end(1)
    assert [holds.holds(7, page) for page in (0, 1)] == [False, True]
    holds.expire(24.0)
    assert holds.holds(7, 1)
    holds.expire(25.0)
    assert not holds.holds(7, 1)
    holds.end(2)
    assert holds.pages == 0


def test_leases_run_out_only_while_pages_are_open():
    leases = Leases(60.0)
    leases.begin(1, 10, 2, 0.0)
    leases.begin(1, 11, 2, 5.0)
    leases.settle(1, 10, 1)
    leases.settle(1, 11, 2)
    assert (leases.expired(59.0), leases.pages) == ([], 1)
    over = leases.expired(70.0)
    assert (over, leases.pages) == ([(1, 10, 1)], 0)
    leases.restore(over)
    assert (leases.pages, leases.expired(70.0), leases.expired(70.0)) == (1, over, [])


def test_a_table_that_starts_reads_rows_ahead_as_many_as_it_keeps(tmp_path, monkeypatch):
    table = a_table(tmp_path / "m.sqlite")
    keys, cleared = keys_of(4), keys_of(3, "cleared")
    stored(table, keys)
    stored(table, cleared, namespace="other", lease=2)
    table.clear("other")
    table.close()

    table = a_table(tmp_path / "m.sqlite")
    table.read_ahead()
    assert len(table._recent) == len(keys), "of a cleared namespace nothing is asked for"
    assert all(refs(table, keys))
    with monkeypatch.context() as patch:
        patch.setattr(_pagetable, "read_rows", None)
        assert refs(table, keys) == [PageRef("kv", page, NBYTES, 7) for page in range(4)]
    assert refs(table, cleared, namespace="other") == [None] * 3
    table._recent = Recent(2)
    table.read_ahead()
    assert len(table._recent) == 2
    assert all(refs(table, keys))
    table.close()


def test_rows_that_are_asked_for_stay_and_others_go():
    recent = Recent(8)
    rows = [(digest, 1, page, NBYTES, 7, 0) for page, digest in enumerate(digests_of(keys_of(12)))]
    digests = [row[0] for row in rows]
    recent.keep(1, rows[:3])
    for row in rows[3:]:
        recent.keep(1, [row])
        assert recent.find(1, digests[:1]) == ({digests[0]: rows[0]}, [])
        assert len(recent) <= 8
    assert recent.find(1, digests[1:3]) == ({}, digests[1:3])
    assert recent.find(2, digests[:1]) == ({}, digests[:1])
    recent.forget(1, digests[:1])
    assert recent.find(1, digests[:1]) == ({}, digests[:1])


def test_a_transaction_that_fails_leaves_rows_as_the_database_has_them(tmp_path, monkeypatch):
    table = a_table(tmp_path / "m.sqlite")
    keys, new = keys_of(PAGES - 1), keys_of(1, "new")
    before = stored(table, keys)
    assert [ref.page for ref in refs(table, keys)] == before
    (taken,) = table.reserve("kv", "n", digests_of(new), 2, 0.0)

    def full(*_):
        table._look_up("n", digests_of([*keys, *new]))  # what a verb reads of its own changes may be undone
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(table._rooms, "count", full)
    with pytest.raises(sqlite3.OperationalError):
        table.delete("n", digests_of(keys[:4]))
    with pytest.raises(sqlite3.OperationalError):
        table.confirm("kv", "n", rows_of([(new[0], taken.page)]), [], 2)
    monkeypatch.undo()
    assert [ref and ref.page for ref in refs(table, [*keys, *new])] == [*before, None]
    assert table.exists("n", digests_of([*keys, *new])) == [True] * len(keys) + [False]
    table.close()


class Failing:
    """A connection on which statements with a certain beginning fail."""

    def __init__(self, base, start: str) -> None:
        self.base, self.start = base, start

    def execute(self, statement, *values):
        if statement.startswith(self.start):
            raise sqlite3.OperationalError("database or disk is full")
        return self.base.execute(statement, *values)

    def __getattr__(self, name):
        return getattr(self.base, name)


def test_a_reserve_that_fails_leaves_the_leases_that_it_found_ended_as_they_were(tmp_path, monkeypatch):
    """The old lease lost its count of pages, and after a late confirmation its other pages had no end."""
    table = a_table(tmp_path / "m.sqlite")
    digests = digests_of(keys_of(3))
    taken = table.reserve("kv", "n", digests, 1, 0.0)
    with monkeypatch.context() as broken:
        broken.setattr(table._rooms, "_base", Failing(table._base, "UPDATE rank"))
        with pytest.raises(sqlite3.OperationalError):
            table.reserve("kv", "n", digests_of(["another"]), 2, 61.0)
    assert (table.counts()["pages_reserved"], table._file("kv").fresh) == (3, 3)
    assert table.confirm("kv", "n", [(digests[0], taken[0].page, NBYTES, None)], [], 1) == [True]
    late = table.reserve("kv", "n", digests_of(keys_of(11, "late")), 3, 200.0)
    assert NO_PAGE not in [reservation.page for reservation in late]
    assert inconsistencies(table._base) == []
    table.close()


def test_a_request_that_comes_again_while_its_pages_are_written_leaves_them_to_the_writer(tmp_path):
    """A repeated request's first copy may arrive when the second one's answer is at work."""
    table = a_table(tmp_path / "m.sqlite", label=FEW)
    digests = digests_of(keys_of(3))
    first = table.reserve("kv", "n", digests, 1, 0.0)
    stored(table, ["page-other"], lease=9)
    assert table.reserve("kv", "n", digests, 1, 1.0) == first
    others = {r.page for r in table.reserve("kv", "n", digests_of(keys_of(4, "b")), 2, 1.0)}
    assert others == {3, 4, NO_PAGE}
    rows = rows_of([(key, r.page) for key, r in zip(keys_of(3), first, strict=True)])
    assert table.confirm("kv", "n", rows, [], 1) == [True] * 3
    assert inconsistencies(table._base) == []
    table.close()


def test_one_writer_takes_in_a_bounded_part_of_a_cleared_namespace(tmp_path):
    """All of it lies in another file, and whoever asks meanwhile waits."""
    many = 6 * 1024
    table = a_table(tmp_path / "m.sqlite")
    table.initialize("other", PageFileLabel("c" * 32, NBYTES, many))
    stored(table, keys_of(many, "dead"), rank="other", namespace="dead")
    table.clear("dead")
    stored(table, keys_of(PAGES), lease=2)
    assert NO_PAGE not in stored(table, keys_of(1, "new"), lease=3)
    left = table._base.execute("SELECT COUNT(*) FROM page WHERE rank=2").fetchone()[0]
    assert left == many - 4 * 1024
    assert NO_PAGE not in stored(table, keys_of(1, "newer"), lease=4)
    assert table._base.execute("SELECT COUNT(*) FROM page WHERE rank=2").fetchone()[0] == 0
    assert inconsistencies(table._base) == []
    table.close()


def test_a_server_keeps_the_longest_hold_that_it_ever_promised(tmp_path):
    """A client that reads on counts on what the server said before it was started with less."""
    path = str(tmp_path / "m.sqlite")
    held = []
    for hold_s in (15.0, 1.0):
        table = PageTable(path, Terms(60.0, hold_s), now=0.0, after_crash=True)
        held.append(table.terms.hold_s)
        table.close()
    assert held == [15.0, 15.0]


def test_a_database_keeps_its_id_and_another_has_another(tmp_path):
    seen = []
    for name in ("a", "a", "b"):
        table = PageTable(str(tmp_path / name), TERMS, now=0.0, after_crash=False)
        seen.append(table.terms.database)
        table.close()
    assert (seen[0] == seen[1], seen[0] == seen[2], len(seen[0])) == (True, False, 32)


def test_keys_of_namespaces_that_hold_nothing_leave_nothing(tmp_path):
    table = a_table(tmp_path / "m.sqlite")
    assert table.delete("unknown", digests_of(keys_of(2))) == [False, False]
    table.report_bad("unknown", [(digests_of(["a"])[0], PageRef("kv", 0, NBYTES, None), Status.CORRUPT)])
    assert table._base.execute("SELECT COUNT(*) FROM space").fetchone()[0] == 0
    table.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE reservation SET pages=X'010203'",
        "UPDATE reservation SET pages='text'",
        "UPDATE rank SET num_pages=-1",
    ],
    ids=["a cut value", "a text", "a count below 0"],
)
def test_damage_in_the_database_is_unavailable_with_a_remedy(tmp_path, damage):
    path = str(tmp_path / "m.sqlite")
    table = a_table(path)
    table.reserve("kv", "n", digests_of(keys_of(2)), 1, 0.0)
    table._base.execute(damage)
    table.close()

    def use() -> None:
        with closing(LocalMetadata(path, "0" * 32, TERMS)) as metadata:
            metadata.initialize("kv", LABEL, deadline=soon())

    with pytest.raises(BackendUnavailable) as caught:
        use()
    assert "It is damaged: restore it" in str(caught.value)
