"""One session's control groups: limits, membership, freeze, kill, usage, and a nested group per process."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from sandkeep.errors import HostCannot, InvalidRequest, LimitUnenforceable
from sandkeep.linux.cgroup import groupfs
from sandkeep.linux.cgroup.groupfs import GroupPlace

_CPU_PERIOD_US: Final = 100_000
_CPU_QUOTA_MIN_US: Final = 1_000
_SOCKET_PART: Final = 4
_SOCKET_MOST: Final = 256 << 20
"""Memory of sockets, which v1 counts separately: a session may use this part of its limit in addition."""


class Capability(NamedTuple):
    """Whether one capability is usable now; if not, ``why`` has the reason."""

    usable: bool
    version: str
    """``v2`` or ``v1``; empty when not usable."""
    why: str


class Counters(NamedTuple):
    """Counters of a session; ``None`` where the machine does not count them."""

    cpu_ms: int | None
    memory_bytes: int | None
    memory_peak_bytes: int | None
    pids: int | None
    oom_kills: int | None


class ProcessGroup:
    """A nested group that holds one process and everything it starts, however it daemonises."""

    __slots__ = ("_place",)

    def __init__(self, place: GroupPlace) -> None:
        self._place = place

    @property
    def path(self) -> str:
        return self._place.path

    def enter(self, pid: int) -> None:
        groupfs.write(f"{self._place.path}/cgroup.procs", pid)

    def pids(self) -> list[int]:
        return groupfs.pids(self._place.path)

    def populated(self) -> bool:
        return groupfs.populated(self._place)

    def kill(self) -> None:
        groupfs.kill(self._place)

    def remove(self) -> None:
        groupfs.remove_tree(self._place.path)


class SessionCgroup:
    """The groups of one session, one directory per hierarchy used."""

    __slots__ = ("_places", "capabilities", "name")

    def __init__(
        self, name: str, places: Mapping[str, GroupPlace], capabilities: Mapping[str, Capability]
    ) -> None:
        self.name = name
        self._places = dict(places)
        self.capabilities = dict(capabilities)

    def record(self) -> dict[str, list[str]]:
        """Return where all groups are, JSON-ready, for ``Hierarchy.open`` in a process of other groups."""
        return {name: list(place) for name, place in self._places.items()}

    def paths(self) -> list[str]:
        """Return the session's directories, each once, the cgroup2 one first."""
        ordered = sorted(self._places.values(), key=lambda place: place.version != "v2")
        return list(dict.fromkeys(place.path for place in ordered))

    def _cgroup2(self) -> str | None:
        for place in self._places.values():
            if place.version == "v2":
                return place.path
        return None

    def _need(self, capability: str) -> GroupPlace:
        try:
            return self._places[capability]
        except KeyError:
            why = self.capabilities[capability].why
            kind = LimitUnenforceable if capability in _LIMITERS else HostCannot
            message = f"control groups give no {capability} here: {why}"
            raise kind(message, part=capability, why=why) from None

    # -- limits

    def limit(self, *, memory: int | None = None, pids: int | None = None, cpu: float | None = None) -> None:
        """Enforce the given limits (bytes, processes, CPUs), swap included; raise for one that cannot be."""
        asked = {"memory": memory, "pids": pids, "cpu": cpu}
        for part, value in asked.items():
            if value is not None and value <= 0:
                raise InvalidRequest(f"{part} limit must be positive, not {value}", field=part)
        for part, value in asked.items():
            if value is None:
                continue
            place = self._need(part)
            try:
                _LIMITERS[part](place, value)
            except OSError as error:
                raise LimitUnenforceable(
                    f"{part} limit {value} refused by the kernel: {error.strerror}",
                    part=part,
                    why=f"{error.filename or place.path}: {error.strerror}",
                ) from error

    def limit_sockets(self) -> None:
        """Limit socket memory if the session's memory is not limited; only v1 counts it separately."""
        if "memory" in self._places:
            _limit_sockets(self._places["memory"], _SOCKET_MOST)

    # -- membership

    def attach(self, pid: int, *, cgroup2: bool = True) -> None:
        """Move a process into every group; ``cgroup2=False`` when clone3 already put it there."""
        skip = None if cgroup2 else self._cgroup2()
        for path in self.paths():
            if path != skip:
                groupfs.write(f"{path}/cgroup.procs", pid)

    def cgroup2_fd(self) -> int:
        """Return a new descriptor for ``CLONE_INTO_CGROUP``, for the caller to close; -1 without cgroup2."""
        path = self._cgroup2()
        if path is None:
            return -1
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def process_group(self, name: str) -> ProcessGroup:
        """Return the nested group of that name; create it if it does not exist."""
        parent = self._need("process_groups")
        path = f"{parent.path}/{groupfs.check_name(name)}"
        try:
            groupfs.mkdir(path, 0o755)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        return ProcessGroup(GroupPlace(parent.version, path))

    def populated(self) -> bool:
        return groupfs.populated(self._need("kill"))

    # -- control

    def freeze(self, timeout: float) -> None:
        """Freeze every process; on ``TimeoutError`` they have been thawed."""
        groupfs.freeze(self._need("freeze"), timeout)

    def thaw(self) -> None:
        groupfs.thaw(self._need("freeze"))

    def kill(self) -> None:
        """Send SIGKILL to every process of the session, frozen or not. Does not wait until they are dead."""
        groupfs.kill(self._need("kill"))

    def usage(self) -> Counters:
        return Counters(
            cpu_ms=self._cpu_ms(),
            memory_bytes=self._int("memory", {"v2": "memory.current", "v1": "memory.usage_in_bytes"}),
            memory_peak_bytes=self._int(
                "memory_peak", {"v2": "memory.peak", "v1": "memory.max_usage_in_bytes"}
            ),
            pids=self._int("pids", {"v2": "pids.current", "v1": "pids.current"}),
            oom_kills=self.oom_kills(),
        )

    def oom_kills(self) -> int | None:
        """Return how many processes the kernel killed for memory; compare before and after a SIGKILL."""
        place = self._places.get("oom")
        if place is None:
            return None
        file = "memory.events" if place.version == "v2" else "memory.oom_control"
        return groupfs.read_key(f"{place.path}/{file}", "oom_kill")

    def _cpu_ms(self) -> int | None:
        place = self._places.get("cpu_time")
        if place is None:
            return None
        if place.version == "v2":
            spent = groupfs.read_key(f"{place.path}/cpu.stat", "usage_usec")
            return None if spent is None else spent // 1_000
        spent = groupfs.read_int(f"{place.path}/cpuacct.usage")
        return None if spent is None else spent // 1_000_000

    def _int(self, capability: str, files: Mapping[str, str]) -> int | None:
        place = self._places.get(capability)
        return None if place is None else groupfs.read_int(f"{place.path}/{files[place.version]}")

    def remove(self) -> None:
        """Remove the session's groups, and the group above if it was the last. Processes must be dead."""
        for path in self.paths():
            groupfs.remove_tree(path)
        for path in self.paths():
            groupfs.remove_parent(os.path.dirname(path))


def _limit_memory(place: GroupPlace, value: float) -> None:
    size = int(value)
    if place.version == "v2":
        groupfs.write(f"{place.path}/memory.max", size)
        groupfs.write_optional(f"{place.path}/memory.swap.max", 0)
        return
    limit, both = f"{place.path}/memory.limit_in_bytes", f"{place.path}/memory.memsw.limit_in_bytes"
    try:
        groupfs.write(limit, size)
    except OSError as error:
        # memory may not exceed memory + swap, so to raise an earlier limit the sum must be raised first.
        if error.errno != errno.EINVAL:
            raise
        groupfs.write(both, size)
        groupfs.write(limit, size)
    groupfs.write_optional(both, size)
    _limit_sockets(place, size // _SOCKET_PART)


def _limit_sockets(place: GroupPlace, size: int) -> None:
    """Limit the buffers of connections on v1. On v2 the memory limit covers them."""
    if place.version == "v1":
        groupfs.write_optional(f"{place.path}/memory.kmem.tcp.limit_in_bytes", min(size, _SOCKET_MOST))


def _limit_pids(place: GroupPlace, value: float) -> None:
    groupfs.write(f"{place.path}/pids.max", int(value))


def _limit_cpu(place: GroupPlace, value: float) -> None:
    quota = max(int(value * _CPU_PERIOD_US), _CPU_QUOTA_MIN_US)
    if place.version == "v2":
        groupfs.write(f"{place.path}/cpu.max", f"{quota} {_CPU_PERIOD_US}")
    else:
        groupfs.write(f"{place.path}/cpu.cfs_period_us", _CPU_PERIOD_US)
        groupfs.write(f"{place.path}/cpu.cfs_quota_us", quota)


_LIMITERS: Final = {"memory": _limit_memory, "pids": _limit_pids, "cpu": _limit_cpu}
