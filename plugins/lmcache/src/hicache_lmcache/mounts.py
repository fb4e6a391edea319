"""Which kind of file system a path lies on: what a system call there may do to a deadline."""

from __future__ import annotations

import os

#: Their calls return, and every process of the host sees a write at once. Anything else counts as a network.
_LOCAL = frozenset(
    [
        "bcachefs",
        "btrfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "jfs",
        "overlay",
        "ramfs",
        "reiserfs",
        "rootfs",
        "squashfs",
        "tmpfs",
        "xfs",
        "zfs",
    ]
)


def file_system_of(path: str, mountinfo: str = "/proc/self/mountinfo") -> str:
    """Name the type of the file system that holds a path, which must exist; "" where it cannot be told.

    Source: proc_pid_mountinfo(5): mount point in field 5, octal escapes; the type follows " - ".
    """
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                before, _, after = line.partition(" - ")
                point = before.split(" ")[4].encode().decode("unicode_escape")
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, after.split(" ")[0]
    except (OSError, IndexError, UnicodeError):
        return ""
    return kind


def is_network(path: str) -> bool:
    """True unless a path lies on a file system that is known to be local."""
    return file_system_of(path) not in _LOCAL
