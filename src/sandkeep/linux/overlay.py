"""The ways to mount an overlay. Each gives a detached mount, by descriptor.

``descriptors``: ``fsconfig`` takes the layers as descriptors, even below a mount that is attached nowhere.
The newest way; Linux has it since 6.15.

``names``: ``mount`` takes the layers by path, and only on attached mounts. So a thread creates a mount
namespace of its own, attaches the layers' mounts there, mounts the overlay, clones it, and ends. The
namespace ends with the thread: no process sees or copies these mounts, and nothing has to be cleaned up.

The way that works is found by trying, never by the kernel's version: distributions patch theirs.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, TypeVar

from sandkeep.errors import LayerError
from sandkeep.linux import syscalls
from sandkeep.linux.syscalls import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY

T = TypeVar("T")

Way = Literal["descriptors", "names"]
WAYS: Final[tuple[Way, ...]] = ("descriptors", "names")
"""Newest first."""
HOW: Final[dict[Way, str]] = {
    "descriptors": "layers given as descriptors (fsconfig)",
    "names": "layers attached in a mount namespace of their own (mount)",
}

MOST_LAYERS: Final = 500
"""The kernel's own limit."""
_PAGE: Final = 4095
"""Bytes of options ``mount`` takes. The kernel truncates the rest without an error."""
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class Stack(NamedTuple):
    """Parts of an overlay: descriptors of its layers, topmost first, and options as in ``mount``."""

    lowers: Sequence[int]
    options: Sequence[str]
    upper: int = -1
    work: int = -1
    """Only with an upper."""
    attributes: int = MOUNT_ATTR_NODEV


def mount(stack: Stack, way: Way, anchor: str) -> int:
    """Mount an overlay and return its descriptor.

    By names this must be called inside ``apart``, with layers opened there. ``anchor`` is a directory to
    attach the overlay to briefly; its content does not matter.
    """
    if len(stack.lowers) > MOST_LAYERS:
        raise _too_many(f"{len(stack.lowers)} layers are more than the kernel's {MOST_LAYERS}")
    return _by_descriptors(stack) if way == "descriptors" else _by_names(stack, anchor)


def read_only(lowers: Sequence[str], options: Sequence[str], way: Way) -> int:
    """Mount a read-only overlay of directories, topmost first; the kernel requires at least two."""

    def build() -> int:
        fds: list[int] = []
        try:
            for path in lowers:
                fds.append(os.open(path, _DIRECTORY))
            attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID
            return mount(Stack(fds, options, attributes=attributes), way, lowers[0])
        finally:
            for fd in fds:
                os.close(fd)

    return build() if way == "descriptors" else apart(build)


def choose_for_reading(directory: str) -> Way:
    """Return the newest way that works for overlays of attached directories, tried with ``directory``."""
    try:
        context = syscalls.fsopen("overlay")
        try:
            layer = os.open(directory, _DIRECTORY)
            try:
                syscalls.fsconfig_fd(context, "lowerdir+", layer)
            finally:
                os.close(layer)
        finally:
            os.close(context)
    except OSError:
        return "names"
    return "descriptors"


def apart(work: Callable[[], T]) -> T:
    """Call ``work`` in a thread with a mount namespace of its own, which no other process sees.

    The thread has a working directory of its own too. Descriptors that it opens and returns stay usable.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body, name="mounts")
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"no thread to mount in: {error}") from error
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def _by_descriptors(stack: Stack) -> int:
    context = syscalls.fsopen("overlay")
    try:
        for layer in stack.lowers:
            syscalls.fsconfig_fd(context, "lowerdir+", layer)
        if stack.upper >= 0:
            syscalls.fsconfig_fd(context, "upperdir", stack.upper)
            syscalls.fsconfig_fd(context, "workdir", stack.work)
        for option in stack.options:
            key, _, value = option.partition("=")
            if value:
                syscalls.fsconfig_string(context, key, value)
            else:
                syscalls.fsconfig_flag(context, key)
        syscalls.fsconfig_create(context)
        return syscalls.fsmount(context, stack.attributes)
    finally:
        os.close(context)


def _by_names(stack: Stack, anchor: str) -> int:
    options = _as_text(stack)
    # There a descriptor's number is its path: short, nothing to escape, and no path shows in /proc/mounts.
    os.chdir("/proc/self/fd")
    syscalls.mount("overlay", anchor, "overlay", 0, options)
    try:
        tree = syscalls.open_tree(anchor)
    finally:
        syscalls.umount2(anchor, syscalls.MNT_DETACH)
    try:
        # Not by mount flags: MS_RDONLY would apply to the whole filesystem, not to this mount.
        syscalls.mount_setattr(tree, attr_set=stack.attributes)
    except BaseException:
        os.close(tree)
        raise
    return tree


def _as_text(stack: Stack) -> str:
    parts = ["lowerdir=" + ":".join(map(str, stack.lowers))]
    if stack.upper >= 0:
        parts += [f"upperdir={stack.upper}", f"workdir={stack.work}"]
    text = ",".join([*parts, *stack.options])
    if len(text) > _PAGE:
        raise _too_many(f"{len(stack.lowers)} layers take {len(text)} bytes of options, {_PAGE} is the most")
    return text


def _too_many(why: str) -> LayerError:
    return LayerError(f"a chain of layers is too long to mount: {why}", hint="fold it")
