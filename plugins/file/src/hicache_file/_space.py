"""A namespace's folder, open: what all catalogs of one instance share."""

from __future__ import annotations

import threading

from hicache_file._epoch import EpochFile
from hicache_file._files import Folder
from hicache_file._format import SegmentHeader
from hicache_file._segment import Handles, Segment


class Space:
    """A namespace's folder and what is shared by all catalogs over it."""

    __slots__ = ("boot", "epoch", "folder", "handles", "janitor", "lock", "namespace", "next_ordinal", "own")

    def __init__(
        self, folder: Folder, epoch: EpochFile, handles: Handles, namespace: bytes, boot: bytes
    ) -> None:
        self.folder = folder
        self.epoch = epoch
        self.handles = handles
        self.namespace = namespace
        self.boot = boot
        self.janitor = handles.janitor
        #: Guards every change of the catalog, and its replacement by a new one.
        self.lock = threading.RLock()
        self.next_ordinal = 0
        #: Segments that lanes of this instance have open, by id.
        self.own: dict[bytes, Segment] = {}

    def new_segment(self, header: SegmentHeader) -> Segment:
        """Give a segment an ordinal, which is never used again."""
        with self.lock:
            ordinal, self.next_ordinal = self.next_ordinal, self.next_ordinal + 1
        return Segment(header, ordinal, self.boot)

    def close(self) -> None:
        """Give every descriptor back that no verb is using."""
        self.handles.close()
        self.epoch.close()
        self.folder.close()
