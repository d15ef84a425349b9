"""Builds the machines of the lab and keeps what they start from.

A machine starts from a disk that is built once for each kernel (Debian's userland and the kernel's modules),
and a second, small disk, the payload, with this clone of the project installed. Both are kept in a cache
outside the clone. A machine writes to an overlay of its own.

    python -m tests.vm.lab [KERNEL...]     build, and say where things are
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.vm import recipe
from tests.vm.debian import LabFailed, NotFetched, Packages, command, missing, sources, unpack
from tests.vm.machine import Image, Machine

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ("src", "dev", "pyproject.toml", "README.md", "LICENSE", "tests/vm/guest")
"""What of the clone goes into the payload."""
KEPT_SECONDS = 3 * 86400


def cache() -> Path:
    """Where everything built from this recipe is."""
    named = os.environ.get("SANDKEEP_VM_CACHE")
    if named:
        above = Path(named)
    else:
        above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sandkeep-vm"
    above.mkdir(mode=0o700, parents=True, exist_ok=True)
    return above / recipe.digest()


def built(name: str, build: Callable[[Path], None]) -> Path:
    """A directory of the cache. Built beside its place and renamed, by one process at a time."""
    place = cache() / name
    place.parent.mkdir(mode=0o700, exist_ok=True)
    with open(place.parent / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            began = time.monotonic()
            _say(f"building {name}")
            draft = place.parent / f"{name}.draft"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(mode=0o755)
            try:
                build(draft)
                draft.rename(place)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
            _say(f"built {name} in {time.monotonic() - began:.0f} s")
    os.utime(place)
    return place


def _say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr, flush=True)


# --- userland ------------------------------------------------------------------------------------------


def tree() -> Path:
    """Debian's userland, without a kernel and without the project."""
    return built("tree", _build_tree)


def _build_tree(draft: Path) -> None:
    suites = (recipe.RELEASE, f"{recipe.RELEASE}-updates", f"{recipe.RELEASE}-security")
    with tempfile.TemporaryDirectory(prefix="sandkeep-lab-") as scratch:
        listed = Path(scratch, "sources.list")
        listed.write_text(sources(*suites))
        command(
            *("mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", "--format=directory"),
            *("--architectures=amd64", f"--include={','.join(recipe.PACKAGES)}"),
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in recipe.LEFT_OUT),
            *(recipe.RELEASE, draft, listed),
            failure=NotFetched,
        )
    for name, text in recipe.FILES.items():
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        (draft / name).write_text(text)
    command("chroot", draft, "sh", "-c", recipe.SET_UP)
    (draft / "etc/machine-id").write_text("")  # each machine makes its own


# --- the project ---------------------------------------------------------------------------------------


def _pip() -> list[str]:
    """A pip of this machine's, or the one in the tree."""
    with contextlib.suppress(LabFailed):
        command(sys.executable, "-m", "pip", "--version")
        return [sys.executable, "-m", "pip"]
    wheel = next((tree() / "usr/share/python-wheels").glob("pip-*.whl"))
    return [sys.executable, f"{wheel}/pip"]


def wheels() -> Path:
    """What the project depends on, for the Python of the machines, which have no network."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["net"]]
    name = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]

    def build(draft: Path) -> None:
        digits = recipe.PYTHON.replace(".", "")
        target = ["--python-version", recipe.PYTHON, "--implementation", "cp", "--only-binary=:all:"]
        for abi in (f"cp{digits}", "abi3", "none"):
            target += ["--abi", abi]
        for platform in ("manylinux2014_x86_64", "manylinux_2_28_x86_64", "manylinux_2_34_x86_64"):
            target += ["--platform", platform]
        command(*_pip(), "download", "--quiet", "--dest", draft, *target, *wanted, failure=NotFetched)

    return built(f"wheels-{name}", build)


def _source_files() -> Iterator[Path]:
    for name in SOURCE:
        path = ROOT / name
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (file for file in found if file.is_file() and "__pycache__" not in file.parts)


def payload() -> Path:
    """A disk with the project as it is in this clone: installed from its wheel, and as source."""
    name = hashlib.sha256()
    for path in _source_files():
        name.update(f"{path.relative_to(ROOT)} {path.stat().st_mode}\n".encode() + path.read_bytes())
    _forget_old_payloads()
    return built(f"payload-{name.hexdigest()[:16]}", _build_payload) / "disk.img"


def _build_payload(draft: Path) -> None:
    content = draft / "content"
    for path in _source_files():
        copy = content / "source" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (content / "guest").symlink_to("source/tests/vm/guest")
    shutil.copytree(wheels(), content / "wheels")
    with tempfile.TemporaryDirectory(prefix="sandkeep-lab-") as scratch:
        command(
            *_pip(),
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            scratch,
            content / "source",
            failure=NotFetched,
        )
        for wheel in Path(scratch).glob("sandkeep-*.whl"):
            shutil.copy(wheel, content / "wheels")
    # In the userland of the machines, at the speed of this one.
    script = f"""
        set -eu
        mount --bind "$1" "$2{recipe.LAB}"
        chroot "$2" python3 -m venv {recipe.LAB}/venv
        chroot "$2" {recipe.LAB}/venv/bin/pip install --quiet --no-index --disable-pip-version-check \\
            --no-cache-dir --find-links {recipe.LAB}/wheels 'sandkeep[net]'
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    clean["PYTHONDONTWRITEBYTECODE"] = "1"  # to the tree, that is; pip compiles what it installs all the same
    command("unshare", "--mount", "sh", "-c", script, "-", content, tree(), env=clean)
    disk(content, draft / "disk.img", "256M", journal=False)
    shutil.rmtree(content)


def _forget_old_payloads() -> None:
    for place in cache().glob("payload-*"):
        if place.is_dir() and place.suffix != ".draft" and time.time() - place.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(place, ignore_errors=True)


def disk(content: Path, image: Path, size: str, *, journal: bool = True) -> None:
    features = [] if journal else ["-O", "^has_journal"]
    command("mke2fs", "-q", "-t", "ext4", *features, "-E", "root_owner=0:0", "-d", content, image, size)


# --- machines ------------------------------------------------------------------------------------------


def image(kernel: str) -> Image:
    """What machines with this kernel start from, built if need be."""
    if kernel not in recipe.KERNELS:
        raise LabFailed(f"there is no kernel {kernel}, but {', '.join(recipe.KERNELS)}")
    kept = built(f"kernel-{kernel}", lambda draft: _build_kernel(recipe.KERNELS[kernel], draft))
    return _image(kernel, kept)


def _image(kernel: str, kept: Path) -> Image:
    release = (kept / "release").read_text().strip()
    return Image(kernel, release, kept / "vmlinuz", kept / "initrd", kept / "disk.img", payload())


def _build_kernel(kernel: recipe.Kernel, draft: Path) -> None:
    """The first kernel of those named that boots."""
    failures = []
    for suite, version in kernel.found_in:
        try:
            _unpack_kernel(suite, version, draft)
            _boots(kernel.name, draft)
            return
        except LabFailed as error:
            failures.append(error)
            _say(f"kernel {version} of {suite} is none for the lab: {str(error).splitlines()[0]}")
    failed = NotFetched if all(isinstance(error, NotFetched) for error in failures) else LabFailed
    raise failed(f"no kernel {kernel.name} boots\n" + "\n".join(map(str, failures)))


def _unpack_kernel(suite: str, version: str, draft: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sandkeep-lab-") as scratch:
        packages = Packages(suite, Path(scratch, "apt"))
        package = packages.kernel(version)
        if package is None:
            raise LabFailed(f"{suite} has no kernel {version}")
        _say(f"{package} of {suite}")
        release = package.removeprefix("linux-image-")
        system = draft / "system"
        command("cp", "-a", tree(), system)
        try:
            unpack(packages.download(package), system)
            command("chroot", system, "depmod", release)
            command("chroot", system, "mkinitramfs", "-o", "/boot/initrd", release)
            (system / f"boot/vmlinuz-{release}").rename(draft / "vmlinuz")
            (system / "boot/initrd").rename(draft / "initrd")
            disk(system, draft / "disk.img", recipe.DISK_SIZE)
        finally:
            shutil.rmtree(system)
    (draft / "release").write_text(release)


def _boots(kernel: str, draft: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sandkeep-lab-") as scratch:
        machine = Machine(_image(kernel, draft), Path(scratch))
        try:
            machine.boot()
            machine.shutdown()
        finally:
            machine.close()


@contextlib.contextmanager
def machine(kernel: str, *, memory: int = 2048, processors: int = 2) -> Iterator[Machine]:
    """A fresh machine, switched on; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="sandkeep-lab-") as scratch:
        made = Machine(image(kernel), Path(scratch), memory=memory, processors=processors)
        try:
            made.boot()
            yield made
        finally:
            made.close()


@functools.cache
def why_not() -> str | None:
    """Why there is no lab on this machine; nothing where there is."""
    return missing()


def main(kernels: list[str]) -> None:
    reason = why_not()
    if reason:
        raise SystemExit(f"lab: {reason}")
    for kernel in kernels or ("6.1", "6.12"):
        found = image(kernel)
        print(f"{kernel}: {found.release}, {found.disk.parent}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (LabFailed, subprocess.SubprocessError) as error:
        raise SystemExit(f"lab: {error}") from None
