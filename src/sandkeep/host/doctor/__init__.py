"""What this machine can do for sessions, found out by trying.

``probe`` returns one ``Finding`` per capability. Anything that creates namespaces or mounts happens in forked
children, in namespaces that end with them, on a scratch directory that is removed: probing leaves nothing.
``trial`` runs such attempts, ``barriers`` holds them, ``machine`` reads what can simply be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from sandkeep.host.doctor import barriers, machine
from sandkeep.host.doctor.finding import Finding, Report, Status

__all__ = ["Finding", "Report", "Status", "probe"]


def _findings(data_dir: str) -> Iterator[Finding]:
    yield machine.python()
    yield machine.kernel()
    yield machine.architecture()
    yield from barriers.findings(data_dir)
    yield from machine.control_groups()
    yield from machine.data_directory(data_dir)
    yield machine.merged_usr()
    yield from machine.limits()


def probe(data_dir: str) -> Report:
    """Try everything; takes some tens of milliseconds. ``data_dir`` need not exist and is not created."""
    return Report("root" if os.geteuid() == 0 else "rootless", tuple(_findings(os.path.abspath(data_dir))))
