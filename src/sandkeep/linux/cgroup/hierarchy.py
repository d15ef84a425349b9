"""The machine's hierarchies: what each offers now, delegation on v2, and making or finding groups."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from sandkeep.errors import NotFound
from sandkeep.linux.cgroup import groupfs, units
from sandkeep.linux.cgroup.groupfs import GroupPlace
from sandkeep.linux.cgroup.session import Capability, SessionCgroup

CAPABILITIES: Final = (
    "memory",
    "pids",
    "cpu",
    "freeze",
    "kill",
    "oom",
    "cpu_time",
    "memory_peak",
    "process_groups",
)
LEAF: Final = "sandkeep-host"
"""Where ``prepare`` moves processes on v2: a group that passes controllers on may not hold processes."""

_CONTROLLERS: Final = ("memory", "pids", "cpu")
# Files that a v2 session group has only if the groups above pass the controller on.
_V2_CONTROLLER: Final = {
    "memory": "memory",
    "pids": "pids",
    "cpu": "cpu",
    "oom": "memory",
    "memory_peak": "memory",
}

# The file whose presence in a new group proves the capability, per version; v1 names its controller too.
_V2_FILES: Final = {
    "memory": "memory.max",
    "pids": "pids.max",
    "cpu": "cpu.max",
    "freeze": "cgroup.freeze",
    "kill": "cgroup.procs",
    "oom": "memory.events",
    "cpu_time": "cpu.stat",
    "memory_peak": "memory.peak",
    "process_groups": "cgroup.procs",
}
_V1_FILES: Final = {
    "memory": (("memory", "memory.limit_in_bytes"),),
    "pids": (("pids", "pids.max"),),
    "cpu": (("cpu", "cpu.cfs_quota_us"),),
    "freeze": (("freezer", "freezer.state"),),
    "kill": (("freezer", "cgroup.procs"), ("pids", "cgroup.procs"), ("memory", "cgroup.procs")),
    "oom": (("memory", "memory.oom_control"),),
    "cpu_time": (("cpuacct", "cpuacct.usage"),),
    "memory_peak": (("memory", "memory.max_usage_in_bytes"),),
    "process_groups": (("freezer", "cgroup.procs"), ("pids", "cgroup.procs")),
}

_V1_CONTROLLERS: Final = frozenset(name for files in _V1_FILES.values() for name, _ in files)


_CEILING_FILES: Final = {
    "memory": (("v2", "memory.max"), ("v1", "memory.limit_in_bytes")),
    "pids": (("v2", "pids.max"), ("v1", "pids.max")),
}
_V1_UNLIMITED: Final = 1 << 60


class Ceiling(NamedTuple):
    """A limit that applies to a group and everything in it."""

    value: int
    group: str


def _tightest(path: str, file: str) -> Ceiling | None:
    """Return the smallest value of a limit from a group up to the mount; groups without one are skipped."""
    tightest: Ceiling | None = None
    while path and os.path.exists(f"{path}/cgroup.procs"):
        value = groupfs.read_int(f"{path}/{file}")
        if value is not None and value < _V1_UNLIMITED and (tightest is None or value < tightest.value):
            tightest = Ceiling(value, path)
        path = os.path.dirname(path)
    return tightest


class Hierarchy:
    """What the machine offers this process. ``capabilities`` has every name of ``CAPABILITIES``."""

    __slots__ = ("_bases", "_parent", "_places", "_service", "_v2", "capabilities", "layout")

    def __init__(
        self, layout: str, v2: str | None, v1: Mapping[str, str], parent: str, *, service: str = ""
    ) -> None:
        self.layout = layout
        """``v2``, ``v1``, ``hybrid`` or ``none``."""
        self._v2 = v2
        self._service = service
        self._bases = dict(v1)
        self._parent = parent
        self._places: dict[str, GroupPlace] = {}
        self.capabilities: dict[str, Capability] = {}
        self._probe()

    # -- probing

    def _probe(self) -> None:
        """Create a group in each hierarchy and check which files the kernel put into it."""
        trials: dict[str, str] = {}
        refusals: dict[str, str] = {}
        for base in {path for path in (self._v2, *self._bases.values()) if path}:
            # A unique name: another process may remove an empty group of sessions at any time.
            trial = f"{base}/{self._parent}.probe-{os.getpid()}"
            try:
                self._make_parent(base, trial)
                trials[base] = trial
            except OSError as error:
                refusals[base] = f"{base}: {error.strerror}"
        try:
            for name in CAPABILITIES:
                self._resolve(name, trials, refusals)
        finally:
            for trial in trials.values():
                groupfs.remove_tree(trial)

    def _resolve(self, name: str, trials: Mapping[str, str], refusals: Mapping[str, str]) -> None:
        reasons = []
        candidates = [("v2", self._v2, _V2_FILES[name])] if self._v2 else []
        candidates += [
            ("v1", self._bases[controller], file)
            for controller, file in _V1_FILES[name]
            if controller in self._bases
        ]
        for version, base, file in candidates:
            assert base is not None
            trial = trials.get(base)
            if trial is None:
                reasons.append(refusals[base])
            elif not os.path.exists(f"{trial}/{file}"):
                reasons.append(self._why_absent(version, base, file))
            elif version == "v2" and not self._passed_on(trial, _V2_CONTROLLER.get(name)):
                reasons.append(f"groups below {base} cannot pass {_V2_CONTROLLER[name]} on")
            else:
                self._places[name] = GroupPlace(version, base)
                self.capabilities[name] = Capability(True, version, "")
                return
        self._places.pop(name, None)
        why = "; ".join(dict.fromkeys(reasons)) or "no control group hierarchy with it is mounted"
        self.capabilities[name] = Capability(False, "", why)

    @staticmethod
    def _passed_on(group: str, controller: str | None) -> bool:
        return controller is None or controller in groupfs.read(f"{group}/cgroup.subtree_control").split()

    @staticmethod
    def _why_absent(version: str, base: str, file: str) -> str:
        controller = file.partition(".")[0]
        if version == "v2" and controller in _CONTROLLERS:
            if controller not in groupfs.read(f"{base}/cgroup.controllers").split():
                return f"the {controller} controller is not available to {base}"
            if controller not in groupfs.read(f"{base}/cgroup.subtree_control").split():
                return f"{base} may use {controller} but does not pass it on (cgroup.subtree_control)"
        return f"this kernel has no {file}"

    # -- version 2 delegation

    def prepare(self, pids: Iterable[int] = ()) -> Hierarchy:
        """Make v2 controllers available to sessions; move this process's own group members if necessary.

        A non-root group can pass controllers on only while it holds no processes itself, so ``pids`` (the
        daemon and its helpers) move into a leaf beside the sessions. When other programs' processes share the
        group and the group above already passes controllers on, sessions go there instead: that group's
        limits still apply. The same applies when the group is that of a systemd service, because systemd
        starts the service's next main process in it. Otherwise ``capabilities`` has the reason. Returns
        itself.
        """
        base = self._v2
        if base is None:
            return self
        wanted = self._enableable(base)
        if not wanted:
            return self
        obstacle = self._reserved(base) or self._vacate(base, set(pids)) or self._enable(base, wanted)
        if obstacle:
            above = os.path.dirname(base)
            if self._usable_above(above):
                self._v2 = above
                obstacle = ""
        self._probe()
        if obstacle:
            for name in _V2_CONTROLLER:
                if not self.capabilities[name].usable:
                    self.capabilities[name] = Capability(False, "", obstacle)
        return self

    def preparable(self, pids: Iterable[int] = ()) -> list[str]:
        """Return the controllers that ``prepare`` would make available; change nothing."""
        base = self._v2
        if base is None:
            return []
        above = os.path.dirname(base)
        writable = os.access(f"{base}/cgroup.subtree_control", os.W_OK)
        if writable and not self._reserved(base) and not self._others(base, set(pids)):
            return self._enableable(base)
        return self._passed_to(above) if self._usable_above(above) else []

    @staticmethod
    def _enableable(base: str) -> list[str]:
        """Return the controllers that could be passed on but are not yet."""
        try:
            available = groupfs.read(f"{base}/cgroup.controllers").split()
            passed = groupfs.read(f"{base}/cgroup.subtree_control").split()
        except OSError:
            return []
        return [name for name in _CONTROLLERS if name in available and name not in passed]

    @staticmethod
    def _holds(base: str) -> set[int]:
        """Return the processes that stop a group from passing controllers on; the real root may hold any."""
        if not os.path.exists(f"{base}/cgroup.type"):
            return set()
        return {int(pid) for pid in groupfs.read(f"{base}/cgroup.procs").split()}

    def _reserved(self, base: str) -> str:
        if not self._service:
            return ""
        return (
            f"{base} is the group of {self._service}: while it passes controllers on to a session, systemd "
            "cannot start the service again"
        )

    def _others(self, base: str, ours: set[int]) -> str:
        others = self._holds(base) - ours
        if not others:
            return ""
        return (
            f"{base} also holds {len(others)} process(es) that are not ours; start in a delegated group of "
            "your own (systemd-run --scope -p Delegate=yes, with --user for an ordinary user)"
        )

    def _vacate(self, base: str, ours: set[int]) -> str:
        """Move ``ours`` into the leaf; return the reason if the group cannot be emptied."""
        try:
            if obstacle := self._others(base, ours):
                return obstacle
            if present := self._holds(base):
                leaf = f"{base}/{LEAF}"
                try:
                    groupfs.mkdir(leaf, 0o755)
                except FileExistsError:
                    pass
                for pid in present:
                    groupfs.write(f"{leaf}/cgroup.procs", pid)
        except OSError as error:
            return f"{base} is not delegated to us: {error.strerror}"
        return ""

    @staticmethod
    def _enable(group: str, controllers: Iterable[str]) -> str:
        try:
            groupfs.write(f"{group}/cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))
        except OSError as error:
            return f"{group}/cgroup.subtree_control: {error.strerror}"
        return ""

    @staticmethod
    def _passed_to(above: str) -> list[str]:
        try:
            passed = groupfs.read(f"{above}/cgroup.subtree_control").split()
        except OSError:
            return []
        return [name for name in _CONTROLLERS if name in passed]

    def _usable_above(self, above: str) -> bool:
        return bool(self._passed_to(above)) and os.access(above, os.W_OK)

    # -- what applies from above

    def ceilings(self) -> dict[str, Ceiling]:
        """Return the tightest memory and pids limit of the groups above, for each that has one."""
        found = {}
        for name, files in _CEILING_FILES.items():
            place = self._places.get(name) or GroupPlace("v2", self._v2 or self._bases.get(name, ""))
            for version, file in files:
                tightest = _tightest(place.path, file) if version == place.version else None
                if tightest is not None:
                    found[name] = tightest
        return found

    # -- sessions

    def _make_parent(self, base: str, parent: str) -> None:
        """Create the group that holds sessions and let it pass on its controllers."""
        if base == self._v2 and not os.access(f"{base}/cgroup.procs", os.W_OK):
            # Moving a process needs write access to this file of the common ancestor, even for the owner of
            # the groups.
            raise PermissionError(errno.EACCES, "not delegated to us (cgroup.procs is not writable)", base)
        try:
            groupfs.mkdir(parent, 0o755)
        except FileExistsError:
            pass
        if base == self._v2:
            offered = groupfs.read(f"{parent}/cgroup.controllers").split()
            enabled = [name for name in _CONTROLLERS if name in offered]
            if enabled:
                self._enable(parent, enabled)

    def create(self, name: str) -> SessionCgroup:
        """Create the session's groups. The result lists each missing capability with the reason."""
        groupfs.check_name(name)
        capabilities = dict(self.capabilities)
        failed: dict[str, str] = {}
        made: list[str] = []
        for base in dict.fromkeys(place.path for place in self._places.values()):
            try:
                self._make_session(base, name)
                made.append(base)
            except FileExistsError:
                for done in made:
                    groupfs.remove_tree(f"{done}/{self._parent}/{name}")
                raise
            except OSError as error:
                failed[base] = f"{base}: {error.strerror}"
        places = {}
        for capability, place in self._places.items():
            if place.path in failed:
                capabilities[capability] = Capability(False, "", failed[place.path])
            else:
                places[capability] = GroupPlace(place.version, f"{place.path}/{self._parent}/{name}")
        return SessionCgroup(name, places, capabilities)

    def _make_session(self, base: str, name: str) -> None:
        parent = f"{base}/{self._parent}"
        path = f"{parent}/{name}"
        # The group above is removed with its last session, perhaps between two of these calls.
        deadline = time.monotonic() + 1.0
        while True:
            try:
                groupfs.mkdir(path, 0o755)
                break
            except FileNotFoundError:
                if time.monotonic() >= deadline:
                    raise
            try:
                self._make_parent(base, parent)
            except FileNotFoundError:
                pass
        for capability, place in self._places.items():
            if place == ("v2", base) and capability in _V2_CONTROLLER:
                # Another process made the group above and has not enabled its controllers yet.
                if not os.path.exists(f"{path}/{_V2_FILES[capability]}"):
                    self._make_parent(base, parent)
                break

    def open(self, name: str, record: Mapping[str, Iterable[str]] | None = None) -> SessionCgroup:
        """Return the groups made earlier, from ``SessionCgroup.record`` or where ``create`` puts them."""
        groupfs.check_name(name)
        if record is None:
            expected = {
                capability: GroupPlace(place.version, f"{place.path}/{self._parent}/{name}")
                for capability, place in self._places.items()
            }
        else:
            expected = {capability: GroupPlace(*place) for capability, place in record.items()}
        there = {path: os.path.isdir(path) for path in {place.path for place in expected.values()}}
        places = {capability: place for capability, place in expected.items() if there[place.path]}
        if not places:
            raise NotFound(f"no control group for session {name}", kind="cgroup", name=name)
        capabilities = {
            capability: Capability(True, places[capability].version, "")
            if capability in places
            else Capability(False, "", self.capabilities[capability].why or "its group is gone")
            for capability in CAPABILITIES
        }
        return SessionCgroup(name, places, capabilities)

    def leftovers(self) -> list[str]:
        """Return the names of every session that still has a group where ``create`` would put one."""
        names: set[str] = set()
        for base in {place.path for place in self._places.values()}:
            names.update(groupfs.children(f"{base}/{self._parent}"))
        return sorted(names)

    def open_leftovers(self) -> list[SessionCgroup]:
        """Return the groups of every session that still has some, except those ending at this moment."""
        found = []
        for name in self.leftovers():
            with suppress(NotFound):
                found.append(self.open(name))
        return found

    def beside(self, prefix: str) -> list[SessionCgroup]:
        """Return groups of sessions in scopes whose names begin so, beside this process's own scope."""
        if self._v2 is None or not os.path.basename(self._v2).endswith(".scope"):
            return []
        slice_ = os.path.dirname(self._v2)
        found = []
        for scope in groupfs.children(slice_):
            path = f"{slice_}/{scope}"
            if scope.startswith(prefix) and scope.endswith(".scope") and path != self._v2:
                for name in groupfs.children(f"{path}/{self._parent}"):
                    place = GroupPlace("v2", f"{path}/{self._parent}/{name}")
                    found.append(SessionCgroup(name, {"kill": place}, {"kill": Capability(True, "v2", "")}))
        return found


def _unescape(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


def _own_dir(mount_root: str, mount_point: str, own: str) -> str | None:
    """Return the directory of this process's group below one mount; ``None`` if the mount hides it."""
    root = mount_root.rstrip("/")
    if own.startswith("/..") or not (own == root or own.startswith(f"{root}/")):
        return None
    return (mount_point.rstrip("/") + own[len(root) :]).rstrip("/")


def detect(
    mounts: str = "/proc/self/mountinfo",
    own: str = "/proc/self/cgroup",
    *,
    parent: str = "sandkeep",
    first: str = units.FIRST,
) -> Hierarchy:
    """Return what control groups offer the calling process now.

    ``parent`` names the group that holds the sessions; callers with separate sets of sessions (one per data
    directory) use one each, so that neither sees the other's as leftovers.
    """
    mine: dict[str, str] = {}
    for line in groupfs.read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            mine[controller] = path
    v2: str | None = None
    v1: dict[str, str] = {}
    for line in groupfs.read(mounts).splitlines():
        left, _, right = line.partition(" - ")
        fields, (fstype, _, options) = left.split(" "), right.split(" ", 2)
        if fstype == "cgroup2" and v2 is None and "" in mine:
            v2 = _own_dir(_unescape(fields[3]), _unescape(fields[4]), mine[""])
            if v2 is not None and os.path.basename(v2) == LEAF:
                v2 = os.path.dirname(v2)
        elif fstype == "cgroup":
            for controller in options.split(","):
                if controller in _V1_CONTROLLERS and controller in mine and controller not in v1:
                    path_ = _own_dir(_unescape(fields[3]), _unescape(fields[4]), mine[controller])
                    if path_ is not None:
                        v1[controller] = path_
    layout = "hybrid" if v2 and v1 else "v2" if v2 else "v1" if v1 else "none"
    service = _restartable(mine.get("", ""), first)
    return Hierarchy(layout, v2, v1, groupfs.check_name(parent), service=service)


def _restartable(own: str, first: str) -> str:
    """Return the service whose next main process systemd will start in this group; empty if none."""
    unit = units.unit_of(own)
    if not unit.endswith(".service") or own == f"{unit}/{LEAF}":
        return ""
    # A hidden PID 1 (ProtectProc=, hidepid=) is most likely systemd.
    return os.path.basename(unit) if units.systemd_runs(first) or not units.path_in(first) else ""
