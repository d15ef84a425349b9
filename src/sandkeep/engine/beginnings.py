"""A session before it has started: its first row, and the specification for its host. Values, and no I/O."""

from __future__ import annotations

from sandkeep.engine import limits
from sandkeep.engine.configuration import of_session, resources
from sandkeep.engine.context import Context
from sandkeep.engine.names import new_id
from sandkeep.host.driver import Limits, SessionSpec
from sandkeep.host.rootfs import HOME, VENDOR_HOME, VENDOR_WORK, Rootfs
from sandkeep.store.rows import Sandbox, Session, SessionStatus, Snapshot


def first_row(
    context: Context, sandbox: Sandbox, *, now_ms: int, source: Snapshot | None, interactive: bool = False
) -> Session:
    """Return the row of a session that has not started, with the configuration of its sandbox."""
    now = now_ms
    return Session(
        id=new_id("sbx", now_ms=now),
        project=sandbox.project,
        sandbox=sandbox.id,
        sandbox_name=sandbox.name,
        status=SessionStatus.PENDING,
        host=context.driver.host,
        requested_ms=now,
        created_ms=now,
        updated_ms=now,
        source_snapshot=source.id if source else None,
        layer_base=source.layer if source else None,
        image=source.image if source else sandbox.image,
        cwd=sandbox.cwd,
        interactive_port=1 if interactive else None,
        driver=context.driver.capabilities().tier,
        **of_session(sandbox),
    )


def spec_of(context: Context, sandbox: Sandbox, session: Session, rootfs: Rootfs) -> SessionSpec:
    """Return what the host needs to start a session."""
    settings = context.settings
    asked = resources(session)
    home, env = _vendor_paths(rootfs) if session.cwd == VENDOR_WORK else (None, {})
    return SessionSpec(
        session=session.id,
        generation=session.generation,
        rootfs=rootfs,
        layer=session.layer_base,
        limits=Limits(
            memory_bytes=asked.memory_mb << 20 if settings.enforce_memory else None,
            cpus=float(asked.cpus),
            pids=limits.pids(asked, settings),
            disk_bytes=limits.disk_bytes(asked, settings),
            explicit=limits.explicit(asked) if sandbox.exact_resources else frozenset(),
        ),
        deadline_ms=context.now_ms() + session.timeout_ms,
        timeout_ms=session.timeout_ms,
        env={**env, **sandbox.env},
        cwd=session.cwd,
        home=home,
        volatile=not session.persistent,
        accept=settings.accept,
        log_cap_bytes=settings.log_cap_bytes,
    )


def _vendor_paths(rootfs: Rootfs) -> tuple[str | None, dict[str, str]]:
    """Return the default user's home and ``PATH`` in a sandbox of the vendor's clients.

    The home is the vendor's where it would be sandkeep's own; the home of an image's own user is kept.
    """
    given = rootfs.defaults.env
    names = str(given.get("PATH", "")).split(":")
    if given.get("HOME") != HOME:
        found = [] if f"{VENDOR_HOME}/bin" in names else [f"{VENDOR_HOME}/bin"]
        return None, {"PATH": ":".join(found + names)}
    rest = [name for name in names if name != f"{HOME}/.local/bin"]
    return VENDOR_HOME, {"PATH": ":".join([f"{VENDOR_HOME}/.local/bin", f"{VENDOR_HOME}/bin", *rest])}
