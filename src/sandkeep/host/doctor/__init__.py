"""Find out, by trying, what this machine can do for sessions.

``probe`` returns one ``Finding`` per capability. Namespaces and mounts are made only in forked children and
end with them, on a scratch directory that is removed: probing leaves nothing.

``barriers``  the isolation barriers and the root filesystem, each tried the way sessions use it
``groups``    what control groups will enforce for sessions
``machine``   facts that are read without trying: versions, filesystem, limits
``trial``     runs an attempt in a forked child, and reports which step failed
``finding``   the values a probe returns
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from sandkeep.host.doctor import barriers, groups, machine
from sandkeep.host.doctor.finding import DoctorReport, Finding, FindingStatus

__all__ = ["DoctorReport", "Finding", "FindingStatus", "probe"]


def _findings(data_dir: str) -> Iterator[Finding]:
    yield machine.python()
    yield machine.kernel()
    yield machine.architecture()
    yield from barriers.findings(data_dir)
    yield from groups.findings(data_dir)
    yield from machine.data_directory(data_dir)
    yield machine.merged_usr()
    yield from machine.limits()


def probe(data_dir: str) -> DoctorReport:
    """Try everything; takes some tens of milliseconds. ``data_dir`` need not exist and is not created."""
    return DoctorReport(
        "root" if os.geteuid() == 0 else "rootless", tuple(_findings(os.path.abspath(data_dir)))
    )
