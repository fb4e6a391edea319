"""Making room: the oldest sealed segments go, what was used in them gets a second chance (R5, R6).

Victims are the sealed segments with the lowest sequences in the whole root, a
few at a time: judged together, the half that was used last is nearer to the
truth than the later used half of each (0.99 of LRU's hits on a trace of
conversations against 0.90). Their kept pages are copied, with the checksums
that they have, into segments that are whole from the moment they have a
journal. Each step may be the last one that this process takes:

1. a new .seg is written              a crash leaves half a segment: the next count removes it
2. its .idx is renamed into place     pages are there twice, which is harmless
3. the events are published           others look at the new one, and forget the old ones
4. each old .idx, then .seg, unlinked half a segment again

Victims are listed once and then used up in order: whatever is created later has
a higher sequence than all of them.

Victims without a mark are only declared deleted, with all their records dead;
their files go when the room is needed. Then, if nobody has one open, it is not
unlinked but taken over: its files become the next segment. The kernel need not
free its page cache and find new pages and inodes, which is half of what a set
costs otherwise. Whoever reads a segment holds its journal's shared lock, so one
that is being read is never written over.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from hicache_file._budget import Ledger, RootFile, is_open, namespaces, remove_pair, scan_folder
from hicache_file._epoch import EpochFile
from hicache_file._files import Folder, lock_alone
from hicache_file._format import DELETED, BadHeader, Event, total_nbytes
from hicache_file._janitor import Janitor
from hicache_file._rescue import Source, rescue
from hicache_file._segment import read_header

#: Victims that are judged together, and the most bytes of them.
GROUP, GROUP_NBYTES = 4, 256 << 20
#: Listing again finds what an earlier pass has moved because all of it was in use.
_LISTS = 3
#: With fewer segments to choose from, victims go one at a time.
_FEW = 4 * GROUP
#: Waiting for a namespace's lock while the root's is held.
LOCK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, order=True)
class Victim:
    """A segment that may be evicted."""

    sequence: int
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Taken:
    """A segment taken over: nobody has it open, and nobody can open it while ``idx`` is locked."""

    folder: Folder
    name: str
    idx: int
    """Its journal, locked alone."""

    @classmethod
    def of(cls, folder: Folder, name: str, nbytes: int) -> Taken | None:
        """Take a segment over if its .seg file has this size and no other name, and nobody has it open.

        Raises:
            OSError.
        """
        found = os.stat(f"{name}.seg", dir_fd=folder.fd, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_size != nbytes:
            return None
        idx = folder.open(f"{name}.idx", os.O_RDWR)
        if os.fstat(idx).st_nlink == 1 and lock_alone(idx):
            return cls(folder, name, idx)
        os.close(idx)
        return None

    def discard(self) -> None:
        """Unlink it after all."""
        os.close(self.idx)
        remove_pair(self.folder, self.name)


class Evictor:
    """Finds and removes victims; used under the root's lock only."""

    def __init__(
        self, root: RootFile, janitor: Janitor, *, fsync: bool, let_go: Callable[[bytes], bool]
    ) -> None:
        """Start with nothing listed.

        Args:
            let_go: closes our own files of a segment; False unless it may be taken over.
        """
        self._root = root
        self._janitor = janitor
        self._fsync = fsync
        self._let_go = let_go
        #: Declared deleted, still there; with whether they may be taken over.
        self._void: deque[tuple[Victim, bool]] = deque()
        self._victims: deque[Victim] = deque()
        #: How many there were when they were listed.
        self._listed = 0
        self._space: tuple[str, Folder, EpochFile | None] | None = None

    def make_room(self, ledger: Ledger, segment_nbytes: int, spared: Collection[bytes]) -> Taken | None:
        """Evict until a segment of this size fits the budget; nothing without one.

        Args:
            spared: ids of segments that stay.

        Returns: an evicted segment of this size whose files are the caller's; or None.

        Raises:
            OSError: ENOSPC when nothing is left to evict.
        """
        lists = 0
        taken: Taken | None = None
        while ledger.capacity and ledger.used + total_nbytes(segment_nbytes) > ledger.capacity:
            if self._void:
                victim, reusable = self._void.popleft()
                wanted = segment_nbytes if reusable and taken is None else 0
                taken = self._drop(ledger, victim, wanted) or taken
                continue
            group = self._next_group(ledger, spared)
            for _, members in groupby(group, attrgetter("namespace")):
                self._evict(ledger, list(members))
            if not group and lists == _LISTS:
                if taken is not None:
                    taken.discard()
                raise OSError(errno.ENOSPC, "nothing is left to evict")
            if not group:
                self._victims = deque(self._list(ledger))
                self._listed, lists = len(self._victims), lists + 1
        return taken

    def finish(self, ledger: Ledger) -> None:
        """Unlink what was declared deleted; the root is locked."""
        while self._void:
            self._drop(ledger, self._void.popleft()[0], 0)

    def close(self) -> None:
        """Give descriptors back."""
        if self._space is not None:
            self._space[1].close()
            if self._space[2] is not None:
                self._space[2].close()
            self._space = None

    def _group(self, ledger: Ledger) -> int:
        """Tell how many victims to judge together."""
        if self._listed < _FEW:
            return 1
        return max(1, min(GROUP, GROUP_NBYTES // max(1, ledger.capacity // 128)))

    def _next_group(self, ledger: Ledger, spared: Collection[bytes]) -> list[Victim]:
        """Take the next victims that are sealed."""
        group: list[Victim] = []
        while self._victims and len(group) < self._group(ledger):
            victim = self._victims.popleft()
            segment_id = bytes.fromhex(victim.name)
            if segment_id in spared or ledger.is_registered(segment_id) or not self._is_there(victim):
                continue
            if not self._is_open(victim):  # the table may be damaged, and its writer at work all the same
                group.append(victim)
        return sorted(group, key=attrgetter("namespace", "sequence"))

    def _is_there(self, victim: Victim) -> bool:
        """Tell whether nobody else has evicted it since it was listed."""
        return self._root.folder.size(f"{victim.namespace}/{victim.name}.idx") > 0

    def _is_open(self, victim: Victim) -> bool:
        """Tell whether a writer has it flocked, or may have."""
        try:
            return is_open(self._opened(victim.namespace)[0], victim.name)
        except OSError:
            return True

    def _list(self, ledger: Ledger) -> list[Victim]:
        ledger.reap()
        victims: list[Victim] = []
        for namespace in namespaces(self._root.folder):
            try:
                folder = self._root.folder.folder(namespace)
            except OSError:
                continue
            try:
                for name in scan_folder(folder).segments:
                    try:
                        sequence = read_header(folder, name).sequence
                    except BadHeader:
                        sequence = 0  # of no use to anybody
                    except (OSError, ValueError):
                        continue
                    victims.append(Victim(sequence, namespace, name))
            finally:
                folder.close()
        return sorted(victims)

    def _evict(self, ledger: Ledger, victims: Sequence[Victim]) -> None:
        """Evict segments of one namespace."""
        try:
            folder, epoch = self._opened(victims[0].namespace)
        except OSError:
            return
        ledger.begin()
        sources = self._sources(folder, epoch, victims)
        try:
            if epoch is not None and any(source.last_use.any() for source in sources):
                self._rescue(ledger, folder, epoch, sources)
                for victim in victims:
                    ledger.remove(folder, victim.name)
                return
            if epoch is not None and sources:
                for source in sources:
                    source.void()
                self._publish(epoch, sources)
            self._void.extend((victim, self._let_go(bytes.fromhex(victim.name))) for victim in victims)
        finally:  # after the unlinks: what frees the page cache is the last close
            for source in sources:
                self._janitor.do(source.close)

    def _drop(self, ledger: Ledger, victim: Victim, wanted_nbytes: int) -> Taken | None:
        """Remove one that was declared deleted, or take it over if it has the wanted size and is free."""
        try:
            folder, _ = self._opened(victim.namespace)
        except OSError:
            return None
        try:
            if wanted_nbytes:
                taken = Taken.of(folder, victim.name, wanted_nbytes)
                if taken is not None:
                    ledger.remove(folder, victim.name, unlink=False)
                    return taken
            seg = folder.open(f"{victim.name}.seg")
        except OSError:
            pass  # half removed, or gone
        else:  # what frees the page cache is the last close
            self._janitor.do(lambda: os.close(seg))
        ledger.remove(folder, victim.name)
        return None

    def _rescue(self, ledger: Ledger, folder: Folder, epoch: EpochFile, sources: Sequence[Source]) -> None:
        """Give marked pages a second chance, and tell others what is gone."""
        limit = max(ledger.capacity // 128, *(source.nbytes for source in sources))
        try:
            for emptied in rescue(self._root, ledger, folder, epoch, sources, limit, fsync=self._fsync):
                for source in emptied:
                    ledger.remove(folder, source.header.id.hex())
        except (OSError, ValueError):
            pass  # a full disk, a damaged file: the rest goes without a second chance
        self._publish(epoch, sources)

    def _publish(self, epoch: EpochFile, sources: Sequence[Source]) -> None:
        """Tell others what is deleted."""
        try:
            with epoch.lock.held(LOCK_TIMEOUT_S):
                epoch.append(
                    [Event(DELETED, source.header.id, 0) for source in sources], sources[0].header.epoch
                )
        except OSError:
            pass  # others find out when they look for the files

    def _sources(self, folder: Folder, epoch: EpochFile | None, victims: Sequence[Victim]) -> list[Source]:
        """Open what of the victims may hold pages worth keeping."""
        sources: list[Source] = []
        if epoch is None:
            return sources
        for victim in victims:
            try:
                current, _ = epoch.state()
                source = Source.open(folder, victim.name)
                if source.header.epoch == current:
                    sources.append(source)
                else:
                    source.close()
            except (OSError, ValueError):
                continue
        return sources

    def _opened(self, namespace: str) -> tuple[Folder, EpochFile | None]:
        """Open a namespace's folder and epoch file; the last one is kept open."""
        if self._space is None or self._space[0] != namespace:
            self.close()
            folder = self._root.folder.folder(namespace)
            epoch = None
            try:
                epoch = EpochFile.open(folder, bytes.fromhex(namespace), writable=True)
            except (OSError, ValueError):
                pass  # nobody can read this namespace: its segments only take room
            self._space = (namespace, folder, epoch)
        return self._space[1], self._space[2]
