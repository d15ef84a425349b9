"""Drop capabilities from the bounding set of this process and of every process it starts."""

from __future__ import annotations

from collections.abc import Container

from sandkeep.linux import syscalls


def drop_bounding_set(keep: Container[int] = ()) -> None:
    """Drop every capability this kernel has, except ``keep``. The permitted set does not change."""
    capability = 0
    while True:
        try:
            syscalls.prctl(syscalls.PR_CAPBSET_READ, capability)
        except OSError:
            return  # the previous capability was the kernel's last
        if capability not in keep:
            syscalls.prctl(syscalls.PR_CAPBSET_DROP, capability)
        capability += 1
