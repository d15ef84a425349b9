"""Debian packages for the lab, from wherever this machine gets its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class LabFailed(Exception):
    """The lab could not be built, or a machine did not do what every machine does."""


class NotFetched(LabFailed):
    """What machines are made of cannot be had here: no network, perhaps."""


def command(
    *argv: str | os.PathLike[str],
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    failure: type[LabFailed] = LabFailed,
) -> str:
    """Run a program of this machine; what it said is told when it fails."""
    done = subprocess.run(
        argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        line = " ".join(map(str, argv))
        raise failure(f"{line}\n{done.stdout[-4000:]}{done.stderr[-8000:]}\nended with {done.returncode}")
    return done.stdout


def mirrors() -> tuple[str, str]:
    """Where this machine gets Debian from: the archive, and the archive of security updates."""
    archive = security = ""
    form = "$(REPO_URI) $(RELEASE)"
    for line in command("apt-get", "indextargets", "--format", form, "Created-By: Packages").splitlines():
        address, release = line.split(" ", 1)
        if release.endswith("-security"):
            security = security or address
        elif "/" not in release:
            archive = archive or address
    if not archive:
        raise LabFailed("apt on this machine has no source of Debian packages")
    return archive, security


def sources(*suites: str) -> str:
    """Lines for sources.list."""
    archive, security = mirrors()
    lines = []
    for suite in suites:
        address = security if suite.endswith("-security") else archive
        if address:
            lines.append(f"deb [signed-by={KEYRING}] {address} {suite} main\n")
    return "".join(lines)


def missing() -> str | None:
    """Why no lab can be built here."""
    if os.geteuid() != 0:
        return "root is needed to build machines"
    programs = {"qemu-system-x86_64": "qemu-system-x86", "qemu-img": "qemu-utils", "apt-get": "apt"}
    programs |= {
        "mmdebstrap": "mmdebstrap",
        "mke2fs": "e2fsprogs",
        "dpkg-deb": "dpkg",
        "unshare": "util-linux",
    }
    for program, package in programs.items():
        if not shutil.which(program):
            return f"{program} is not installed (package {package})"
    if os.uname().machine != "x86_64":
        return "the machines of the lab have x86-64 processors"
    if not os.path.exists(KEYRING):
        return f"{KEYRING} is missing (package debian-archive-keyring)"
    try:
        mirrors()
    except LabFailed as error:
        return str(error)
    return None


class Packages:
    """The packages of one suite, with lists of their own: the machine's are neither read nor changed."""

    def __init__(self, suite: str, scratch: Path) -> None:
        for name in ("state/lists/partial", "cache/archives/partial"):
            (scratch / name).mkdir(parents=True)
        (scratch / "status").touch()
        (scratch / "sources.list").write_text(sources(suite))
        self._scratch = scratch
        self._own = ["-o", f"Dir::State={scratch}/state", "-o", f"Dir::Cache={scratch}/cache"]
        self._own += ["-o", f"Dir::Etc::SourceList={scratch}/sources.list", "-o", "Dir::Etc::SourceParts=-"]
        self._own += ["-o", f"Dir::State::status={scratch}/status", "-o", "APT::Sandbox::User=root"]
        self._own += ["-o", "APT::Architecture=amd64", "-o", "APT::Architectures::=amd64"]
        command("apt-get", "-qq", *self._own, "update", failure=NotFetched)

    def kernel(self, version: str) -> str | None:
        """The newest signed kernel for clouds whose version begins so."""
        names = command("apt-cache", *self._own, "pkgnames", f"linux-image-{version}").split()
        found = [name for name in names if re.fullmatch(r"linux-image-[\d.]+[^-]*(-\d+)?-cloud-amd64", name)]
        return max(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], default=None)

    def download(self, package: str) -> Path:
        command("apt-get", "-qq", *self._own, "download", package, cwd=self._scratch, failure=NotFetched)
        return next(self._scratch.glob(f"{package}_*.deb"))


def unpack(package: Path, target: Path) -> None:
    """Unpack into a tree where /lib is a link, as it is everywhere now."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as content:
        done = subprocess.run(
            ["tar", "-C", target, "--keep-directory-symlink", "-x"], stdin=content.stdout, capture_output=True
        )
    if done.returncode or content.returncode:
        raise LabFailed(f"cannot unpack {package.name}: {done.stderr.decode(errors='replace')}")
