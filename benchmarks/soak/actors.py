"""Who makes the load: each actor does one thing after another to one sandbox after another."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.soak.expected import ABSENT, Expected, Files, Output, digest
from benchmarks.soak.tally import Tally
from sandkeep import sync
from sandkeep.errors import (
    InternalError,
    NameTaken,
    NotFound,
    PathNotFound,
    SandkeepError,
    SnapshotGone,
)

_SIZES = (0, 10, 5_000, 100_000, 400_000)
"""Of files; the last ones go to the supervisor directly."""
_PATHS = tuple(f"d{number % 3}/f{number}" for number in range(8))
_MOST_OUTPUTS = 12
_MOST_CHECKPOINTS = 3


class Gate:
    """Lets actors work, and holds them back while the checker examines what they did."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working: dict[str, str] = {}
        self._paused = False
        self.ended = False

    @contextmanager
    def work(self, who: str) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._paused or self.ended)
            self._working[who] = "something"
        try:
            yield
        finally:
            with self._changed:
                del self._working[who]
                self._changed.notify_all()

    def doing(self, who: str, what: str) -> None:
        with self._changed:
            self._working[who] = what

    @contextmanager
    def pause(self, seconds: float) -> Iterator[list[str]]:
        """Everybody has finished what they did; given are those who have not after so long."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._working, timeout=seconds)
            hanging = [f"{who}: {what}" for who, what in self._working.items()]
        try:
            yield hanging
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.ended = True
            self._changed.notify_all()


class Actor:
    """One of those who use sandboxes. What it does next follows from the seed and its number."""

    def __init__(
        self, number: int, client: sync.Client, names: list[Expected], gate: Gate, tally: Tally, seed: int
    ) -> None:
        self.name = f"actor {number}"
        self.thread = threading.Thread(target=self._act, name=self.name, daemon=True)
        self._client = client
        self._names = names
        self._gate = gate
        self._tally = tally
        self._random = random.Random(f"{seed} actor {number}")
        self._number = number
        self._steps = 0
        self.touched: set[str] = set()
        """Names since the last look."""

    def greet(self) -> None:
        """Reach the server once: only one that was there before is waited for."""
        self._client.query_sandboxes().page()

    def close(self) -> None:
        self._client.close()

    def _act(self) -> None:
        with self._client:
            while not self._gate.ended:
                with self._gate.work(self.name):
                    if not self._gate.ended:
                        self._step()

    def _step(self) -> None:
        self._steps += 1
        box = self._random.choice(self._names)
        operation = self._random.choices([*_OPERATIONS], [*_OPERATIONS.values()])[0]
        with box.lock:
            self.touched.add(box.name)
            if box.doomed:
                operation = "destroy"
            elif not box.exists:
                operation = "get_or_create" if operation in ("get_or_create", "resume") else "create"
            self._gate.doing(self.name, f"{operation} {box.name}")
            self.attempt(operation, box, getattr(self, f"_{operation}"))

    def attempt(self, operation: str, box: Expected, work: Callable[[Expected], None]) -> bool:
        """Do something; an error that is one of ours is counted, anything else is a violation."""
        try:
            work(box)
        except SandkeepError as error:
            self._tally.failed(operation, error)
            self._judge(operation, box, error)
        except Exception as error:
            self._tally.failed(operation, error)
            self._tally.violation(f"{operation} {box.name}: {type(error).__name__} reached a client: {error}")
        else:
            self._tally.done(operation)
            return True
        return False

    def _judge(self, operation: str, box: Expected, error: SandkeepError) -> None:
        """Errors that must not happen, whichever process was killed."""
        wrong = isinstance(error, InternalError | SnapshotGone) or type(error) is SandkeepError
        wrong = wrong or isinstance(error, PathNotFound)
        wrong = wrong or (isinstance(error, NotFound) and box.exists is True and not box.doomed)
        wrong = wrong or (isinstance(error, NameTaken) and box.exists is False)
        if wrong:
            kind = f"{type(error).__name__} {error.http_status}"
            self._tally.violation(f"{operation} {box.name} (exists: {box.exists}): {kind}: {error}")

    # --- sandboxes come and go ---------------------------------------------------------------------------

    def _create(self, box: Expected) -> None:
        if box.exists is None:
            self._find_out(box)
            return
        box.exists = None if (before := box.exists) is False else before
        try:
            self._client.create_sandbox(box.name)
        except NameTaken:
            if before is not True:
                box.exists = False
                raise
            return
        box.created()

    def _find_out(self, box: Expected) -> None:
        try:
            self._client.get_sandbox(box.name)
        except NotFound:
            box.gone()
        else:
            box.created()

    def _get_or_create(self, box: Expected) -> None:
        before, box.exists = box.exists, box.exists or None
        self._client.get_or_create_sandbox(box.name)
        if before:
            self._compare(box, self._client.get_sandbox(box.name), box.files)
        box.created()

    def _destroy(self, box: Expected) -> None:
        box.doomed = True
        try:
            self._client.get_sandbox(box.name).destroy()
        except NotFound:
            pass
        box.gone()

    # --- processes ---------------------------------------------------------------------------------------

    def _run(self, box: Expected) -> None:
        first, count, code = self._random.randrange(10**6), self._random.randrange(3000), self._steps % 7
        pause = self._random.choice(("0", "0", "0.3", "1"))
        script = f"seq {first} {first + count}; sleep {pause}; seq {count} >&2; exit {code}"
        handle = self._client.get_sandbox(box.name)
        done = handle.run_process("sh", ["-c", script], capture_output=True)
        stdout = "".join(f"{number}\n" for number in range(first, first + count + 1)).encode()
        stderr = "".join(f"{number}\n" for number in range(1, count + 1)).encode()
        if (done.returncode, done.stdout, done.stderr) != (code, stdout, stderr):
            self._tally.violation(
                f"{box.name}: process {done.process_id} ended with {done.returncode} instead of {code}, "
                f"or its output is another one ({len(done.stdout or b'')} and {len(done.stderr or b'')} "
                f"bytes instead of {len(stdout)} and {len(stderr)})"
            )
        box.outputs.append(Output(done.process_id, done.session_id, digest(stdout), digest(stderr)))
        del box.outputs[:-_MOST_OUTPUTS]

    def _input(self, box: Expected) -> None:
        data = self._random.randbytes(self._random.choice(_SIZES))
        handle = self._client.get_sandbox(box.name)
        done = handle.run_process("cat", input=data, capture_output=True, timeout=120)
        if (done.returncode, done.stdout) != (0, data):
            self._tally.violation(f"{box.name}: cat gave something else than it was given")

    def _terminal(self, box: Expected) -> None:
        with self._client.get_sandbox(box.name).open_interactive("sh", ["-c", "exit 5"]) as terminal:
            if (code := terminal.wait()) != 5:
                self._tally.violation(f"{box.name}: a terminal's program ended with {code} instead of 5")

    def _output(self, box: Expected) -> None:
        if box.outputs:
            self.compare_output(box, self._client, self._random.choice(box.outputs))

    def compare_output(self, box: Expected, client: sync.Client, output: Output) -> None:
        process = client.get_sandbox(box.name).get_process(output.process, session_id=output.session)
        found = process.communicate()
        if tuple(map(digest, found)) != (output.stdout, output.stderr):
            self._tally.violation(f"{box.name}: the log of process {output.process} has changed")

    # --- files -------------------------------------------------------------------------------------------

    def _write(self, box: Expected) -> None:
        path = self._random.choice(_PATHS)
        data = self._random.randbytes(self._random.choice(_SIZES))
        handle = self._client.get_sandbox(box.name)
        before = box.files.get(path)
        box.may_have_written(path, digest(data))
        try:
            handle.fs.write_bytes(path, data)
        except PathNotFound:
            if before is not None:
                box.files[path] = before
            raise
        box.wrote(path, digest(data))

    def _write_inside(self, box: Expected) -> None:
        path, text = self._random.choice(_PATHS), f"{self._number} {self._steps}\n"
        box.may_have_written(path, digest(text.encode()))
        handle = self._client.get_sandbox(box.name)
        script = f"mkdir -p $(dirname {path}); printf '{text}' > {path}.new && mv {path}.new {path}"
        if handle.run_process("sh", ["-c", script]).returncode == 0:
            box.wrote(path, digest(text.encode()))

    def _read(self, box: Expected) -> None:
        self._compare(box, self._client.get_sandbox(box.name), box.files)

    def _compare(self, box: Expected, handle: sync.Sandbox, files: Files) -> None:
        """Everything that was acknowledged is there, byte for byte."""
        for path, allowed in list(files.items()):
            try:
                found = digest(handle.fs.read_bytes(path))
            except PathNotFound:
                found = ABSENT
            if found not in allowed:
                self._tally.violation(f"{handle.name}: {path} is {found[:12]}, not one of {sorted(allowed)}")
            elif files is box.files:
                box.files[path] = frozenset({found})

    # --- sessions and snapshots --------------------------------------------------------------------------

    def _stop(self, box: Expected) -> None:
        self._client.get_sandbox(box.name).stop()

    def _resume(self, box: Expected) -> None:
        handle = self._client.resume_sandbox(box.name)
        if handle.status is not sync.SessionStatus.RUNNING:
            self._tally.violation(f"{box.name} is {handle.status} after a resume")

    def _snapshot(self, box: Expected) -> None:
        self._client.get_sandbox(box.name).snapshot()

    def _checkpoint(self, box: Expected) -> None:
        if len(box.checkpoints) < _MOST_CHECKPOINTS:
            taken = self._client.get_sandbox(box.name).checkpoint()
            box.checkpoints[taken.id] = dict(box.files)

    def _from_checkpoint(self, box: Expected) -> None:
        if box.checkpoints:
            chosen = self._random.choice([*box.checkpoints])
            with self._client.create_sandbox(source=sync.SnapshotSource(chosen)) as other:
                self._compare(box, other, box.checkpoints[chosen])

    def _delete_snapshot(self, box: Expected) -> None:
        if box.checkpoints:
            chosen = self._random.choice([*box.checkpoints])
            del box.checkpoints[chosen]
            self._client.delete_snapshot(chosen)

    def _fork(self, box: Expected) -> None:
        handle = self._client.get_sandbox(box.name)
        handle.stop()
        with handle.fork() as fork:
            self._compare(box, fork, dict(box.files))

    def whole(self, box: Expected) -> None:
        """Whether a sandbox is as it must be, and can be used."""
        if box.exists is None or box.doomed:
            return
        handle = self._client.get_or_create_sandbox(box.name) if box.exists else None
        if handle is None:
            return
        handle.run_process("true", check=True)
        self._compare(box, handle, box.files)
        for output in box.outputs[-2:]:
            self.compare_output(box, self._client, output)


_OPERATIONS = {
    "create": 1,
    "get_or_create": 4,
    "destroy": 3,
    "run": 14,
    "input": 4,
    "terminal": 2,
    "output": 4,
    "write": 10,
    "write_inside": 6,
    "read": 10,
    "stop": 5,
    "resume": 5,
    "snapshot": 3,
    "checkpoint": 3,
    "from_checkpoint": 2,
    "delete_snapshot": 1,
    "fork": 2,
}
