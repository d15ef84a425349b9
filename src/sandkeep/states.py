"""States and other closed sets of words: what a session, snapshot, process or mount can be.

Every value is the word that JSON and the store use.
"""

from __future__ import annotations

from enum import StrEnum


class SessionStatus(StrEnum):
    """Status of a session; a sandbox has the status of its latest session."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"
    SNAPSHOTTING = "snapshotting"
    STOPPED = "stopped"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def is_final(self) -> bool:
        """Whether the session has ended for good."""
        return self in (SessionStatus.STOPPED, SessionStatus.FAILED, SessionStatus.ABORTED)


class SnapshotStatus(StrEnum):
    """Status of a snapshot; only a ``created`` one can be started from."""

    CREATED = "created"
    DELETED = "deleted"
    FAILED = "failed"


class SnapshotMethod(StrEnum):
    """How a snapshot was made: on stop, on request (ending the session), or while the session went on."""

    AUTOMATIC = "automatic"
    MANUAL = "manual"
    CHECKPOINT = "checkpoint"


class ProcessStatus(StrEnum):
    """Status of a process; ``lost`` means that its session ended first."""

    RUNNING = "running"
    EXITED = "exited"
    FAILED = "failed"
    KILLED = "killed"
    LOST = "lost"


class EndReason(StrEnum):
    """How a process ended."""

    EXITED = "exited"
    """By itself, with any exit code."""
    TIMEOUT = "timeout"
    """Its time limit was reached: ``kill_after``, or ``timeout`` of ``run_process``."""
    KILLED = "killed"
    """By a signal, of a caller or of another process."""
    OUT_OF_MEMORY = "out_of_memory"
    """The sandbox had no memory left."""
    LOST = "lost"
    """Its session ended first."""
    FAILED = "failed"
    """It could not be run; or it ran elsewhere, and its observer says so."""


class OutputStream(StrEnum):
    """The stream that a process wrote to."""

    STDOUT = "stdout"
    STDERR = "stderr"


class MountMode(StrEnum):
    """How a drive is mounted: writable by one session, or a read-only copy of its state at session start."""

    READ_WRITE = "read-write"
    SNAPSHOT = "snapshot"


class PolicyMode(StrEnum):
    """The kinds of network policy."""

    ALLOW_ALL = "allow-all"
    DENY_ALL = "deny-all"
    CUSTOM = "custom"


class FileKind(StrEnum):
    """Type of a directory entry."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    BLOCK_DEVICE = "block_device"
    CHARACTER_DEVICE = "character_device"


class Tier(StrEnum):
    """The isolation technology around a session."""

    NATIVE = "native"
    OCI = "oci"
    MICROVM = "microvm"


class SortOrder(StrEnum):
    """Ascending or descending."""

    ASC = "asc"
    DESC = "desc"


class Paths(StrEnum):
    """Whose conventions for home and working directory a sandbox follows."""

    SANDKEEP = "sandkeep"
    VERCEL = "vercel"


class SandboxSort(StrEnum):
    """Sort keys for sandboxes."""

    CREATED_AT = "createdAt"
    NAME = "name"
    STATUS_UPDATED_AT = "statusUpdatedAt"
    CURRENT_SNAPSHOT_ID = "currentSnapshotId"


class DriveSort(StrEnum):
    """Sort keys for drives."""

    CREATED_AT = "createdAt"
    UPDATED_AT = "updatedAt"
    NAME = "name"
