"""Control groups v2, v1 and hybrid behind one interface.

``detect`` finds, for each capability, the hierarchy that provides it to us now, or the reason why none does.
A session's groups are ``<our own group>/sandkeep/<name>`` in every hierarchy used, so limits the owner of
this machine put on us keep applying to everything we start. In a hybrid layout limits come from v1, while
kill, freeze, CPU time and nested groups come from the cgroup2 mount, which needs no controllers for them.

A missing capability is never an error of ``create``; asking for a limit nobody enforces is one
(``LimitUnenforceable``), as is using a missing capability (``HostCannot``). Other failures stay ``OSError``.
Process ids are those of the caller's pid namespace.

``groupfs`` knows the kernel's files, ``session`` one session's groups, ``hierarchy`` the machine. Imported
by the zygote: few imports, no dataclasses. Nothing here holds a descriptor, so it may be used after a fork.
"""

from sandkeep.linux.cgroup.groupfs import Place
from sandkeep.linux.cgroup.hierarchy import CAPABILITIES, LEAF, Hierarchy, detect
from sandkeep.linux.cgroup.session import Capability, ProcessGroup, SessionCgroup, Usage

__all__ = [
    "CAPABILITIES",
    "LEAF",
    "Capability",
    "Hierarchy",
    "Place",
    "ProcessGroup",
    "SessionCgroup",
    "Usage",
    "detect",
]
