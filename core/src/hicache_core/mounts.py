"""Which kind of file system a path lies on: what a system call there may do to a deadline.

Every backend that keeps files must know (C11): a server behind a mount can go
away in the middle of a call. What is not known to be local counts as a network,
since the mistake in that direction costs speed and the other one a hang.
"""

from __future__ import annotations

import os
import re

#: Their calls return, and every process of the host sees a write at once. Source: filesystems(5).
_LOCAL = frozenset(
    [
        "bcachefs",
        "btrfs",
        "devtmpfs",
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


_ESCAPE = re.compile(r"\\([0-7]{3})")


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
                point = _ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), before.split(" ")[4])
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, after.split(" ")[0]
    except (OSError, IndexError):
        return ""
    return kind


def is_network(path: str) -> bool:
    """True unless a path lies on a file system that is known to be local."""
    return file_system_of(path) not in _LOCAL
