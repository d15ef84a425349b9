"""What the machines of the lab are made of: packages, set-up of the userland, kernels.

All machines have the userland of Debian 12. Whatever is here is part of the name of the cached result, so
a change makes new machines.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

RELEASE = "bookworm"
PYTHON = "3.11"
DISK_SIZE = "6G"

PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "dbus-user-session", "libpam-systemd", "udev", "kmod", "procps"),
    *("initramfs-tools", "util-linux", "passwd", "uidmap", "iproute2", "nftables", "ca-certificates"),
    *("e2fsprogs", "btrfs-progs", "xfsprogs", "python3", "python3-venv", "git", "curl"),
)
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")

MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "ext4")
"""What a kernel needs before it has its root filesystem. The rest is loaded from there."""

LAB = "/opt/lab"
"""Where a machine has the payload: the agent, the project installed and as source, its wheels."""

AGENT_UNIT = f"""\
[Unit]
Description=Runs commands of the tests
RequiresMountsFor={LAB}
After=systemd-user-sessions.service dbus.service systemd-logind.service

[Service]
ExecStart=/usr/bin/python3 {LAB}/guest/agent.py
Restart=always
TasksMax=infinity
KillMode=process

[Install]
WantedBy=multi-user.target
"""

FSTAB = f"""\
/dev/vda / ext4 noinit_itable 0 1
/dev/vdb {LAB} ext4 ro,x-systemd.device-timeout=600 0 0
"""

FILES = {
    "etc/fstab": FSTAB,
    "etc/hostname": "lab\n",
    "etc/hosts": "127.0.0.1 localhost lab\n::1 localhost\n",
    "etc/initramfs-tools/conf.d/lab": "MODULES=list\nCOMPRESS=gzip\n",
    "etc/initramfs-tools/modules": "\n".join(MODULES) + "\n",
    "etc/systemd/journald.conf.d/lab.conf": "[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n",
    "etc/systemd/system.conf.d/lab.conf": "[Manager]\nDefaultTimeoutStartSec=600\n",
    "etc/systemd/user.conf.d/lab.conf": "[Manager]\nDefaultTimeoutStartSec=600\n",
    "etc/systemd/system/lab-agent.service": AGENT_UNIT,
    "var/lib/systemd/linger/alice": "",
}

# Slow under emulation, and none of it is what a test looks at.
NOT_STARTED = (
    *("serial-getty@ttyS0.service", "getty@tty1.service", "apt-daily.timer", "apt-daily-upgrade.timer"),
    *("dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer"),
    *("systemd-binfmt.service", "proc-sys-fs-binfmt_misc.automount", "modprobe@drm.service"),
    *("modprobe@efi_pstore.service", "systemd-update-utmp-runlevel.service", "sys-kernel-tracing.mount"),
    *("sys-kernel-debug.mount", "dev-hugepages.mount", "systemd-update-utmp.service"),
)

# alice is the ordinary user of a good machine. bob may map no id but his own, and nothing of his runs
# before he logs in.
SET_UP = f"""\
set -eu
useradd --create-home --shell /bin/bash --uid 1000 alice
useradd --create-home --shell /bin/bash --uid 1001 bob
echo alice:100000:65536 | tee /etc/subuid >/etc/subgid
mkdir -p {LAB}
ln -s {LAB}/venv /opt/sandkeep
ln -s {LAB}/venv/bin/sandkeep /usr/local/bin/sandkeep
systemctl enable --quiet lab-agent.service
systemctl mask --quiet {" ".join(NOT_STARTED)}
"""


@dataclass(frozen=True)
class Kernel:
    """A kernel of Debian's for machines in a cloud; it has the drivers QEMU needs and few others."""

    name: str
    found_in: tuple[tuple[str, str], ...]
    """Suites and beginnings of versions. The newest package of the first pair that boots is taken."""


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("5.10", (("bullseye-security", "5.10."), ("bullseye", "5.10."))),
        Kernel("6.1", ((f"{RELEASE}-security", "6.1."), (RELEASE, "6.1."))),
        # Software emulation cannot run every build of this one: some panic when they allocate memory.
        Kernel(
            "6.12", (("trixie-security", "6.12."), ("trixie", "6.12."), ("bookworm-backports", "6.12.43"))
        ),
        Kernel("6.16", (("trixie-backports", "6.16."),)),
        Kernel("6.18", (("trixie-backports", "6.18."),)),
        Kernel("7.2", (("trixie-backports", "7.2."), ("forky", "7.2."))),
    )
}


def digest() -> str:
    """The name of everything above."""
    parts = [RELEASE, PYTHON, DISK_SIZE, PACKAGES, LEFT_OUT, FILES, SET_UP]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
