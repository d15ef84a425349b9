"""Control groups v2, v1 and hybrid behind one interface.

``detect`` finds, for each capability, the hierarchy that provides it to this process now, or the reason why
none does. A session's groups are ``<own group>/sandkeep/<name>`` in every hierarchy used, so limits that the
owner of this machine put on this process keep applying to everything it starts (``host.native.scope`` first
moves the zygote into a group of its own where systemd gives one). In a hybrid layout limits come from v1,
while kill, freeze, CPU time and nested groups come from the cgroup2 mount, which needs no controllers for
them.

A missing capability never makes ``create`` fail; setting a limit that the kernel cannot enforce raises
``LimitUnenforceable``, and using a missing capability raises ``HostCannot``. Other failures stay ``OSError``.
Process ids are those of the caller's pid namespace.

``hierarchy``  the machine's hierarchies: what each offers, delegation, making and finding groups
``session``    one session's groups: limits, members, freeze, kill, usage, a nested group per process
``groupfs``    the kernel's files of a group: read, write, remove
``units``      systemd's names: whether it runs this machine, which unit a group belongs to

The zygote imports this package: few imports, no dataclasses. It holds no descriptors, so it may be used after
a fork.
"""

from sandkeep.linux.cgroup.groupfs import GroupPlace
from sandkeep.linux.cgroup.hierarchy import CAPABILITIES, LEAF, Ceiling, Hierarchy, detect
from sandkeep.linux.cgroup.session import Capability, Counters, ProcessGroup, SessionCgroup
from sandkeep.linux.cgroup.units import group_name

__all__ = [
    "CAPABILITIES",
    "LEAF",
    "Capability",
    "Ceiling",
    "Counters",
    "GroupPlace",
    "Hierarchy",
    "ProcessGroup",
    "SessionCgroup",
    "detect",
    "group_name",
]
