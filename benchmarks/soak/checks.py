"""What must hold after every kill, and what must be gone at the end."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from benchmarks.soak.expected import Expected
from benchmarks.soak.site import Being, Site
from benchmarks.soak.tally import Tally
from sandkeep import sync
from sandkeep.linux import cgroup
from sandkeep.shared.sealed import read_sealed

SETTLE_SECONDS = 60.0


def sandboxes(client: sync.Client, names: Iterable[Expected], tally: Tally) -> None:
    """No name is lost, none is there that should not be."""
    found = {info.name for info in client.query_sandboxes()}
    for box in names:
        if box.exists is True and not box.doomed and box.name not in found:
            tally.violation(f"{box.name} is lost")
        if box.exists is False and box.name in found:
            tally.violation(f"{box.name} was destroyed and is there")


def sessions(client: sync.Client, site: Site, tally: Tally) -> None:
    """A sandbox has one session at most, and every supervisor belongs to a known session."""
    active = [info for info in client.query_sessions() if not info.status.is_final]
    for name, count in Counter(info.sandbox for info in active).items():
        if count > 1:
            tally.violation(f"{name} has {count} sessions")
    supervised = Counter(being.session for being in site.beings() if being.kind == "supervisor")
    for session, count in supervised.items():
        if count > 1:
            tally.violation(f"session {session} has {count} supervisors")


class Leftovers:
    """What sessions were seen to use, to be looked for when all are gone."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._beings: set[Being] = set()
        self._sessions: set[str] = set()
        self._mounts = set(_mounts())

    def note(self) -> None:
        """Remember who is alive."""
        found = [being for being in self._site.beings() if being.kind != "client"]
        self._beings.update(found)
        self._sessions.update(being.session for being in found if being.session)

    def descriptors(self) -> dict[str, int]:
        """How many are open in each process that serves every session."""
        found = {}
        for being in self._site.beings():
            if being.kind in ("server", "zygote", "worker"):
                with suppress(PermissionError):  # an ordinary user may not look into all of them
                    found[being.kind] = len(os.listdir(f"/proc/{being.pid}/fd"))
        return found

    def of_sessions(self) -> list[str]:
        """While the server runs, with every sandbox destroyed."""
        data = self._site.data
        found = [f"{being.kind} {being.pid}" for being in self._site.beings() if being.session]
        found += [f"directory sessions/{name}" for name in _entries(f"{data}/sessions")]
        layers = _entries(f"{data}/layers")
        found += [f"layer {name}" for name in layers if name not in _set_aside(f"{data}/layers", layers)]
        groups = set(cgroup.detect().leftovers()) & self._sessions
        return found + [f"control group {name}" for name in sorted(groups)]

    def of_everything(self) -> list[str]:
        """After the server has ended."""
        self._site.reap()
        found = [f"{being.kind} {being.pid}" for being in self._beings if being.alive()]
        found += [f"{being.kind} {being.pid}" for being in self._site.beings()]
        return found + [f"mount {mount}" for mount in _mounts() if mount not in self._mounts]


def settled(look: Callable[[], list[str]], *, seconds: float = SETTLE_SECONDS) -> list[str]:
    """What is still there after work in the background has had its time."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _entries(directory: str) -> list[str]:
    # A leading dot or another beginning is the store's own: drafts, identity, what was set aside.
    return sorted(name for name in os.listdir(directory) if name.startswith(("sbx_", "lay_")))


def _mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [" ".join(line.split(" ")[3:5]) for line in lines]


def _set_aside(place: str, layers: list[str]) -> set[str]:
    """Layers whose row a killed server could not write, which are kept for days, and what they stand on."""
    found: set[str] = set()
    for layer in layers:
        if any(name == "set-aside" or name.startswith("doubt-") for name in os.listdir(f"{place}/{layer}")):
            at: str | None = layer
            while at is not None and at not in found:
                found.add(at)
                at = read_sealed(f"{place}/{at}/meta.json")["parent"]
    return found
