"""Every step of every operation, and a process killed at each: by enumeration, not by chance.

A step is where something that lasts changes, or is about to: a commit of the store, a request to the worker,
to a supervisor, the zygote or netd (before it is sent, and once it is), and inside the worker each name that
appears, moves or goes. Nothing in the product knows of this: the methods are wrapped here, the worker is
started by `step_worker.py`.

The first run of an operation counts. Then it is run once for every step, and dies there: the server alone, or
the server together with its worker. Whoever opens the data directory next checks that everything acknowledged
is there, repeats the operation, destroys everything, and finds nothing left over; then it is the next victim.
So one start of an engine serves both. A worker that dies alone does not end the server, so those are all done
by one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from sandkeep.engine.engine import Engine
from sandkeep.engine.netd_client import NetdClient
from sandkeep.engine.settings import Settings
from sandkeep.errors import NotFound, SandkeepError, SessionStopped
from sandkeep.host.native import driver as native
from sandkeep.host.native.zygote_client import ZygoteClient
from sandkeep.host.storage import Storage
from sandkeep.policy import NetworkPolicy
from sandkeep.spec import Mount, SandboxSpec
from sandkeep.states import MountMode
from sandkeep.store.rows import ACTIVE, SnapshotMethod, SnapshotStatus
from sandkeep.store.sqlite import SqliteDatabase
from tests.engine.engine_lab import run_script

_SECONDS = 120.0
_HOUR_MS = 3_600_000
_ALWAYS_THERE = (".lock", ".identity")
DRIVER_STEPS = ("create", "stop", "forget", "checkpoint", "set_deadline", "listeners")
LOOKING = ("rootfs", "drive_content", "layer_holders", "list_layers", "get_image", "forget", "listeners")
"""Asking for these changes nothing that lasts, so there is nothing new to die after."""


# --- counting in the server -------------------------------------------------------------------------------


class Steps:
    """Those of this process: counted while armed, and the one to die at."""

    def __init__(self) -> None:
        self.armed = False
        self.names: list[str] = []
        self.die_at = 0

    def take(self, name: str) -> None:
        if self.armed:
            self.names.append(name)
            if len(self.names) == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)


STEPS = Steps()


def _asked(name: str, real: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Two steps: nothing was asked yet; it was asked and the answer has not come."""

    async def counted(*args: Any, **options: Any) -> Any:
        what = f"{name} {args[1]}" if len(args) > 1 and isinstance(args[1], str) else name
        STEPS.take(what)
        if not STEPS.armed or what.split()[-1] in LOOKING or what.split()[0] in LOOKING:
            return await real(*args, **options)
        work = asyncio.ensure_future(real(*args, **options))
        await asyncio.sleep(0)
        STEPS.take(f"{what}, asked")
        return await work

    return counted


def wrap_the_server() -> None:
    execute = SqliteDatabase._execute

    def counted(self: SqliteDatabase, sql: str, values: tuple[Any, ...]) -> Any:
        changes = sql.startswith(("INSERT", "UPDATE", "DELETE")) and not self._in_transaction
        if sql == "COMMIT" or changes:
            STEPS.take(f"store {' '.join(sql.split()[:3])}")
        return execute(self, sql, values)

    SqliteDatabase._execute = counted  # type: ignore[method-assign]
    asking = [(Storage, "_request", "worker"), (ZygoteClient, "ask", "zygote")]
    asking += [(native.NativeDriver, name, name) for name in DRIVER_STEPS]
    for owner, method, shown in asking:
        setattr(owner, method, _asked(shown, getattr(owner, method)))
    ask = NetdClient.ask

    async def told(self: NetdClient, channel: Any, op: str, *args: Any, **body: Any) -> Any:
        STEPS.take(f"netd {op}")
        return await ask(self, channel, op, *args, **body)

    NetdClient.ask = told  # type: ignore[method-assign]
    write_sealed = vars(native)["write_sealed"]

    def written(path: str, body: Any) -> None:
        STEPS.take(f"write {os.path.basename(path)}")
        write_sealed(path, body)

    vars(native)["write_sealed"] = written
    spawn = native.NativeDriver.spawn

    def counting_worker(
        self: native.NativeDriver, argv: list[str], fd: int, environment: dict[str, str]
    ) -> None:
        argv = [step_worker if part.endswith("start_worker.py") else part for part in argv]
        spawn(self, argv, fd, environment)

    step_worker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "step_worker.py")
    native.NativeDriver.spawn = counting_worker  # type: ignore[method-assign]


# --- what is done, and what must hold afterwards ----------------------------------------------------------


class World:
    """An engine on the data directory, and what the operations share."""

    def __init__(self, data_dir: str) -> None:
        self.data_dir = data_dir
        self.place = f"{data_dir}-steps"
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.engine: Engine
        self.project = ""
        self.facts: dict[str, Any] = {}
        """What was true and acknowledged before the operation began; passed on to whoever comes next."""

    async def open(self) -> None:
        settings = Settings(pool=0, set_aside_ms=0)
        self.engine = await Engine.open(
            self.data_dir, settings=settings, log=lambda text, **facts: self.log.append((text, facts))
        )
        self.project = self.engine.project(team="team_test", name="prj_test").id
        await self.engine.network.ready()
        await self.engine.storage.get_image("host")
        for task in asyncio.all_tasks():
            if task.get_name() == "upkeep":
                task.cancel()  # it is done when it is asked for, so that steps are the same each time

    # --- shorthands

    async def create(self, name: str, **spec: Any) -> str:
        started = await self.engine.sandboxes.create(self.project, SandboxSpec(name=name, **spec))
        return started.session.id

    async def resume(self, name: str) -> str:
        return (await self.engine.sandboxes.resume(self.project, name)).session.id

    async def sh(self, session: str, script: str) -> str:
        return await run_script(self.engine, self.project, session, script)

    async def stop(self, session: str) -> Any:
        return await self.engine.sessions.stop(self.project, session)

    async def destroy(self, name: str) -> None:
        await self.engine.sandboxes.destroy(self.project, name, delete_orphan_snapshots=True)

    async def box(self, **spec: Any) -> str:
        """A running sandbox with a file, whose first session has ended before."""
        session = await self.create("box", **spec)
        await self.sh(session, "echo kept > f")
        await self.stop(session)
        session = await self.resume("box")
        await self.sh(session, "echo more > g")
        return session

    async def drive(self, name: str = "drive") -> None:
        await self.engine.drives.get_or_create(self.project, name, region="local")

    async def box_on_a_drive(self) -> str:
        await self.drive()
        session = await self.create("box", mounts={"/drive": Mount("drive", MountMode.READ_WRITE)})
        await self.sh(session, "echo kept > /drive/f; echo kept > f")
        return session

    def exists(self, name: str) -> bool:
        return self.engine.store.sandboxes.find(self.project, name) is not None

    async def settled(self) -> None:
        """Until what runs beside requests and is to be finished is."""
        context = self.engine._context
        while context._finishing:
            await asyncio.wait(set(context._finishing))

    # --- what holds whatever happened

    def one_session_each(self) -> None:
        for sandbox in self.engine.store.sandboxes.page(self.project).items:
            rows = self.engine.store.sessions.page(self.project, sandbox=sandbox.id).items
            assert sum(row.status in ACTIVE for row in rows) <= 1, rows
            assert sandbox.current_session is not None
            assert all(row.status not in ACTIVE or row.status == "running" for row in rows), rows

    async def files(self, name: str, *expected: str) -> None:
        session = await self.resume(name)
        for path in expected:
            found = await self.sh(session, f"cat {path}")
            assert found in ("kept\n", "more\n"), (name, path, found)

    async def clear(self) -> None:
        """Destroy everything; nothing is left over."""
        for sandbox in self.engine.store.sandboxes.page(self.project).items:
            await self.destroy(sandbox.name)
        for drive in self.engine.store.drives.page(self.project).items:
            await self.engine.drives.delete(self.project, drive.name)
        for snapshot in self.engine.store.snapshots.unsynced_everywhere():
            # Of a sandbox that was destroyed without its snapshots.
            await self.engine.snapshots.delete(self.project, snapshot.id)
        await self.settled()
        assert not self.engine.store.sandboxes.condemned_everywhere()
        deadline = time.monotonic() + 20
        while left := self._left():  # a worker of the server that was killed may still be at it
            assert time.monotonic() < deadline, left
            await self.engine.storage.recover_layers()
            await self.engine.garbage.release_holders()
            await self.engine.garbage.remove_sessions()
            await asyncio.sleep(0.05)

    def _left(self) -> list[str]:
        names = [name for name in os.listdir(f"{self.data_dir}/layers") if not name.startswith(_ALWAYS_THERE)]
        layers = [f"layers/{name}" for name in names]
        sessions = [f"sessions/{name}" for name in os.listdir(f"{self.data_dir}/sessions")]
        return layers + sessions


Prepare = Callable[[World], Awaitable[None]]
Check = Callable[[World], Awaitable[None]]


class Operation:
    """What is killed in the middle of, what comes before, and what must be true of it afterwards.

    ``check`` repeats the operation where it was not carried out, and fails unless that works.
    """

    def __init__(self, prepare: Prepare, run: Prepare, check: Check) -> None:
        self.prepare, self.run, self.check = prepare, run, check


async def _nothing(world: World) -> None:
    del world


async def _running_box(world: World) -> None:
    world.facts["session"] = await world.box()


async def _stopped_box(world: World) -> None:
    _, snapshot = await world.stop(await world.box())
    world.facts["snapshot"] = snapshot.id


async def _volatile_box(world: World) -> None:
    world.facts["session"] = await world.create("box", persistent=False)
    await world.sh(world.facts["session"], "echo kept > f")


async def _drive_box(world: World) -> None:
    world.facts["session"] = await world.box_on_a_drive()


async def _drive_unchanged(world: World) -> None:
    await world.stop(await world.box_on_a_drive())
    world.facts["session"] = await world.resume("box")


async def _written_drive(world: World) -> None:
    await world.stop(await world.box_on_a_drive())


async def _small_image(world: World) -> None:
    path = f"{world.data_dir}-image"
    os.makedirs(f"{path}/etc", exist_ok=True)
    with open(f"{path}/etc/os-release", "w", encoding="ascii") as handle:
        handle.write("ID=test\n")


async def _imported(world: World) -> None:
    await _small_image(world)
    await _import(world)


async def _import(world: World) -> None:
    await world.engine.storage.import_image(f"{world.data_dir}-image", kind="directory", name="small")


async def _check_import(world: World) -> None:
    await _import(world)
    await world.engine.storage.get_image("small")
    await _check_remove_image(world)


async def _remove_image(world: World) -> None:
    await world.engine.storage.remove_image("small")


async def _check_remove_image(world: World) -> None:
    try:
        await _remove_image(world)
    except NotFound:
        pass
    images = await world.engine.storage.list_images()
    assert not [image for image in images if "small" in image.names], images
    shutil.rmtree(f"{world.data_dir}-image", ignore_errors=True)


async def _check_new(world: World) -> None:
    """A sandbox that was being made is there and runs, or there is nothing of it."""
    if world.exists("new"):
        assert world.engine.sandboxes.get(world.project, "new").session.status == "running"
    else:
        await world.create("new")
    await world.sh(await world.resume("new"), "true")


async def _fork(world: World) -> None:
    await world.engine.sandboxes.fork(world.project, "box", {"name": "new"})


async def _check_fork(world: World) -> None:
    if not world.exists("new"):
        await _fork(world)
    await world.files("new", "f", "g")
    await world.files("box", "f", "g")


async def _fork_many(world: World) -> None:
    await world.engine.batches.fork(world.project, "box", {"name": "many"}, 3)


async def _check_fork_many(world: World) -> None:
    """All of them are there and run, or none is."""
    names = [f"many-{number}" for number in (1, 2, 3)]
    there = [name for name in names if world.exists(name)]
    assert there in ([], names), there
    assert not world.engine.store.sandboxes.of_batches_everywhere()
    if not there:
        await _fork_many(world)
    for name in ("box", *names):
        await world.files(name, "f", "g")


async def _fail_to_fork_many(world: World) -> None:
    await world.create("many-2")
    try:
        await _fork_many(world)
    except SandkeepError:
        return
    raise AssertionError("it was to fail")


async def _check_no_forks(world: World) -> None:
    assert not world.exists("many-1") and not world.exists("many-3")
    assert not world.engine.store.sandboxes.of_batches_everywhere()
    await world.files("box", "f", "g")


async def _fail_to_create(world: World) -> None:
    try:
        await world.create("new", image="nothing-of-that-name")
    except SandkeepError:
        return
    raise AssertionError("it was to fail")


async def _check_no_new(world: World) -> None:
    assert not world.exists("new")
    await world.create("new")


async def _check_box(world: World) -> None:
    await world.files("box", "f", "g")
    await world.stop(await world.resume("box"))
    await world.files("box", "f", "g")


async def _stop(world: World) -> None:
    await world.stop(world.facts["session"])


async def _check_volatile(world: World) -> None:
    """Running with its file, or ended without: never anything else."""
    ended, snapshot = await world.stop(world.facts["session"])
    assert (ended.status, snapshot) == ("stopped", None), (ended, snapshot)
    await world.sh(await world.resume("box"), "test ! -e f")


async def _snapshot(world: World) -> None:
    await world.engine.sessions.snapshot(world.project, world.facts["session"], lifetime_ms=48 * _HOUR_MS)


async def _check_snapshot(world: World) -> None:
    try:
        await _snapshot(world)
    except SessionStopped:
        pass  # the end that was cut short has been finished
    current = world.engine.store.sandboxes.get(world.project, "box").current_snapshot
    assert current is not None
    snapshot = world.engine.snapshots.get(world.project, current)
    assert (snapshot.method, snapshot.expiry_asked) == (SnapshotMethod.MANUAL, True), snapshot
    await world.files("box", "f", "g")


async def _checkpoint(world: World) -> None:
    await world.engine.sessions.checkpoint(world.project, world.facts["session"])


async def _check_checkpoint(world: World) -> None:
    assert await world.resume("box") == world.facts["session"], "the session was to go on"
    await _checkpoint(world)
    await world.files("box", "f", "g")


async def _delete_snapshot(world: World) -> None:
    for snapshot in world.engine.store.snapshots.page(world.project).items:
        if snapshot.id != world.facts["snapshot"] and snapshot.status is SnapshotStatus.CREATED:
            await world.engine.snapshots.delete(world.project, snapshot.id)


async def _check_delete_snapshot(world: World) -> None:
    await _delete_snapshot(world)
    await world.files("box", "f", "g")


async def _rollback(world: World) -> None:
    await world.engine.sandboxes.update(
        world.project, "box", {"ports": (3000,)}, current_snapshot=world.facts["snapshot"]
    )


async def _check_rollback(world: World) -> None:
    await _rollback(world)
    await world.files("box", "f", "g")


async def _destroy(world: World) -> None:
    world.facts["sandbox"] = world.engine.sandboxes.get(world.project, "box").sandbox.id
    await world.destroy("box")


async def _check_destroy(world: World) -> None:
    if world.exists("box"):
        await world.files("box", "f")
        await world.destroy("box")
    for sandbox in {event.sandbox for event in _events(world, "sandbox.created")}:
        destroyed = [event for event in _events(world, "sandbox.destroyed") if event.sandbox == sandbox]
        assert len(destroyed) == 1, (sandbox, destroyed)
    await world.create("box")


def _events(world: World, kind: str) -> Any:
    return world.engine.store.events.page(world.project, kind=kind).items


async def _check_drive(world: World) -> None:
    session = await world.resume("box")
    assert await world.sh(session, "cat /drive/f f") == "kept\nkept\n"
    await world.stop(session)
    assert await world.sh(await world.resume("box"), "cat /drive/f") == "kept\n"


async def _fork_drive(world: World) -> None:
    await world.engine.drives.fork(world.project, "drive", name="other")


async def _check_fork_drive(world: World) -> None:
    if world.engine.store.drives.find(world.project, "other") is None:
        await _fork_drive(world)
    mounts = {"/drive": Mount("other", MountMode.SNAPSHOT)}
    assert await world.sh(await world.create("new", mounts=mounts), "cat /drive/f") == "kept\n"
    await world.destroy("new")
    await world.destroy("box")


async def _unused_drive(world: World) -> None:
    await _written_drive(world)
    await world.destroy("box")


async def _delete_drive(world: World) -> None:
    await world.engine.drives.delete(world.project, "drive")


async def _check_delete_drive(world: World) -> None:
    if world.engine.store.drives.find(world.project, "drive") is not None:
        await _delete_drive(world)
    await world.drive()


async def _destroy_with_a_drive(world: World) -> None:
    await world.destroy("box")


async def _check_destroyed_with_a_drive(world: World) -> None:
    if world.exists("box"):
        await world.destroy("box")
    mounts = {"/drive": Mount("drive", MountMode.READ_WRITE)}
    assert await world.sh(await world.create("new", mounts=mounts), "cat /drive/f") == "kept\n"


async def _configure(world: World) -> None:
    await world.engine.sandboxes.set_policy(world.project, world.facts["session"], NetworkPolicy.deny_all())
    await world.engine.sessions.extend(world.project, world.facts["session"], by_ms=60_000)
    await world.engine.secrets.set(world.project, "token", "value")
    await world.engine.secrets.remove(world.project, "token")


async def _check_configure(world: World) -> None:
    try:
        await world.engine.secrets.remove(world.project, "token")
    except NotFound:
        pass
    await _configure(world)
    assert await world.resume("box") == world.facts["session"]


async def _upkeep(world: World) -> None:
    await world.engine.upkeep.turn()


OPERATIONS: dict[str, Operation] = {
    "create": Operation(_nothing, lambda world: _discard(world.create("new")), _check_new),
    "create that fails": Operation(_nothing, _fail_to_create, _check_no_new),
    "fork": Operation(_stopped_box, _fork, _check_fork),
    "fork many": Operation(_stopped_box, _fork_many, _check_fork_many),
    "fork many that fails": Operation(_stopped_box, _fail_to_fork_many, _check_no_forks),
    "resume": Operation(_stopped_box, lambda world: _discard(world.resume("box")), _check_box),
    "stop": Operation(_running_box, _stop, _check_box),
    "stop without keeping": Operation(_volatile_box, _stop, _check_volatile),
    "snapshot": Operation(_running_box, _snapshot, _check_snapshot),
    "checkpoint": Operation(_running_box, _checkpoint, _check_checkpoint),
    "delete snapshot": Operation(_stopped_box, _delete_snapshot, _check_delete_snapshot),
    "roll back": Operation(_stopped_box, _rollback, _check_rollback),
    "destroy": Operation(_running_box, _destroy, _check_destroy),
    "destroy, stopped": Operation(_stopped_box, _destroy, _check_destroy),
    "attach a drive": Operation(_written_drive, lambda world: _discard(world.resume("box")), _check_drive),
    "publish a drive": Operation(_drive_box, _stop, _check_drive),
    "publish an unchanged drive": Operation(_drive_unchanged, _stop, _check_drive),
    "destroy with a drive": Operation(_drive_box, _destroy_with_a_drive, _check_destroyed_with_a_drive),
    "fork a drive": Operation(_written_drive, _fork_drive, _check_fork_drive),
    "delete a drive": Operation(_unused_drive, _delete_drive, _check_delete_drive),
    "import an image": Operation(_small_image, _import, _check_import),
    "remove an image": Operation(_imported, _remove_image, _check_remove_image),
    "policy, deadline, secret": Operation(_running_box, _configure, _check_configure),
    "upkeep": Operation(_stopped_box, _upkeep, _check_box),
}


UNKNOWN_FOR_A_WHILE = ("checkpoint", "fork a drive")
"""They refer to a layer before their row is there. Without that row the layer is set aside, then deleted."""


async def _discard(work: Awaitable[Any]) -> None:
    await work


# --- one victim after the other ---------------------------------------------------------------------------


async def _victim(world: World, before: str | None, plan: dict[str, Any]) -> dict[str, Any]:
    """Check what the victim before left, then be the next one. Returns only when not killed."""
    await world.open()
    if before is not None:
        with open(f"{world.place}/facts", encoding="utf-8") as handle:
            world.facts = json.load(handle)
        world.one_session_each()
        aside = [facts for text, facts in world.log if text.endswith("set-aside")]
        assert not aside or before in UNKNOWN_FOR_A_WHILE, aside
        await OPERATIONS[before].check(world)
        await world.settled()
    await world.clear()
    counted: dict[str, Any] = {}
    if plan["kill"] == "worker":
        for at in plan["at"]:
            await _perform(world, plan | {"at": at})
            assert os.path.exists(f"{world.place}/worker-killed") or at > plan["sure"], (
                f"step {at} never came"
            )
            await OPERATIONS[plan["operation"]].check(world)
            await world.settled()
            await world.clear()
    elif plan["kill"] != "nobody":
        await _perform(world, plan)
        with open(f"{world.place}/worker-steps", encoding="utf-8") as handle:
            counted = {"server": STEPS.names, "worker": handle.read().splitlines()}
        await OPERATIONS[plan["operation"]].check(world)
        await world.settled()
        await world.clear()
    await world.engine.close()
    return counted


async def _perform(world: World, plan: dict[str, Any]) -> None:
    """The operation itself, with every step counted, and death at the planned one."""
    operation = OPERATIONS[plan["operation"]]
    world.facts = {}
    await operation.prepare(world)
    await world.settled()
    for name in ("worker-steps", "worker-killed", "worker-plan"):
        if os.path.exists(f"{world.place}/{name}"):
            os.unlink(f"{world.place}/{name}")
    open(f"{world.place}/worker-steps", "w").close()
    with open(f"{world.place}/facts", "w", encoding="utf-8") as handle:
        json.dump(world.facts, handle)
    if plan["kill"] in ("worker", "both"):
        with open(f"{world.place}/worker-plan", "w", encoding="ascii") as handle:
            json.dump({"at": plan["at"], "server": os.getpid() if plan["kill"] == "both" else 0}, handle)
    STEPS.names.clear()
    STEPS.die_at = plan["at"] if plan["kill"] == "server" else 0
    open(f"{world.place}/armed", "w").close()
    STEPS.armed = True
    await operation.run(world)
    await world.settled()
    STEPS.take("the answer")
    STEPS.armed = False
    os.unlink(f"{world.place}/armed")


def _in_a_fork(data_dir: str, before: str | None, plan: dict[str, Any]) -> dict[str, Any]:
    """Run a victim; ``killed`` says whether it died as planned."""
    place = f"{data_dir}-steps"
    if os.path.exists(f"{place}/armed"):
        os.unlink(f"{place}/armed")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        answer: dict[str, Any]
        world = World(data_dir)
        try:
            work = _victim(world, before, plan)
            seconds = _SECONDS * (len(plan["at"]) if plan["kill"] == "worker" else 1)
            answer = {"counted": asyncio.run(asyncio.wait_for(work, seconds))}
        except BaseException:
            answer = {"failure": f"{traceback.format_exc()}\nlog: {world.log[-8:]}"}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as answers:
        text = answers.read()
    _, status = os.waitpid(pid, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    return {"killed": True}


def _planned(count: int, sample: int | None) -> list[int]:
    """All of them, or some, evenly spread, the last one among them."""
    if sample is None or count <= sample:
        return list(range(1, count + 1))
    return sorted({round((index + 1) * count / sample) for index in range(sample)})


def enumerate_steps(data_dir: str, operations: list[str], sample: int | None) -> dict[str, Any]:
    """Kill at every step of these operations, or a sample; returns how many, and what went wrong."""
    place = f"{data_dir}-steps"
    os.makedirs(place, exist_ok=True)
    os.environ["STEPS"] = place
    os.environ["STEPS_PATH"] = ":".join(os.path.abspath(entry or ".") for entry in sys.path)
    wrap_the_server()
    report: dict[str, Any] = {"failures": [], "operations": {}, "seconds": {}}
    before: dict[str, Any] | None = None

    def victim(plan: dict[str, Any]) -> dict[str, Any]:
        nonlocal before
        found = _in_a_fork(data_dir, None if before is None else before["operation"], plan)
        if "failure" in found:
            report["failures"].append({"before": before, "plan": plan, "failure": found["failure"]})
            _start_anew(data_dir)
        before = plan if found.get("killed") else None
        return found

    for operation in operations:
        begun = time.monotonic()
        counts = {"server": 0, "both": 0, "worker": 0}
        found = victim({"operation": operation, "kill": "count", "at": 0})
        if "counted" in found:
            server, worker = found["counted"]["server"], found["counted"]["worker"]
            for at in _planned(len(server), sample):
                counts["server"] += "killed" in victim({"operation": operation, "kill": "server", "at": at})
            for at in _planned(len(worker), sample):
                counts["both"] += "killed" in victim({"operation": operation, "kill": "both", "at": at})
            alone = _planned(len(worker), sample)
            if alone:
                # What is deleted beside the operation may be done in one go: the last steps may never come.
                sure = max(1, len(worker) * 3 // 4)
                victim({"operation": operation, "kill": "worker", "at": alone, "sure": sure})
                counts["worker"] = len(alone)
            report["operations"][operation] = counts | {"steps": {"server": server, "worker": worker}}
        report["seconds"][operation] = round(time.monotonic() - begun, 1)
    victim({"operation": operations[-1], "kill": "nobody", "at": 0})
    shutil.rmtree(place)
    return report


def _start_anew(data_dir: str) -> None:
    """After a violation: what is in the directory says nothing about the next step."""
    found = _in_a_fork(data_dir, None, {"kill": "nobody", "operation": "create", "at": 0})
    if "failure" in found:
        shutil.rmtree(data_dir, ignore_errors=True)
