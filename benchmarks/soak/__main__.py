"""Use sandboxes in every way while every kind of process is killed, and check what was promised.

Prints operations, kills by kind, errors by type and violations. Ends with status 1 when there is a violation.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

from benchmarks.soak import checks
from benchmarks.soak.actors import Actor, Gate
from benchmarks.soak.expected import Expected
from benchmarks.soak.site import Site
from benchmarks.soak.tally import Tally
from sandkeep import sync
from sandkeep.errors import SandkeepError

KILLS = {
    "server": 6,
    "zygote": 2,
    "worker": 3,
    "netd": 3,
    "supervisor": 5,
    "init": 3,
    "client": 2,
    "ready": 1,
}
"""Who is killed, and how often in proportion."""
HANGING_SECONDS = 180.0
CLIENT_NAME = "journal"


@dataclass(frozen=True, slots=True)
class Plan:
    seconds: float
    seed: int
    actors: int
    names: int


class Soak:
    def __init__(self, plan: Plan, data: str, tally: Tally) -> None:
        self._plan = plan
        self._tally = tally
        self._random = random.Random(f"{plan.seed} kills")
        self._site = Site(data, tally, plan.seed)
        self._gate = Gate()
        self._names = [Expected(f"n-{number}") for number in range(plan.names)]
        self._actors: list[Actor] = []
        self._acknowledged: list[str] = []

    def run(self) -> None:
        try:
            self._run()
        finally:
            self._site.abandon()

    def _run(self) -> None:
        self._site.open()
        self._leftovers = checks.Leftovers(self._site)
        for number in range(self._plan.actors):
            client = self._site.client(tcp=bool(number % 2))
            self._actors.append(Actor(number, client, self._names, self._gate, self._tally, self._plan.seed))
        # Not started: it looks at sandboxes while the others rest.
        self._judge = Actor(-1, self._client(), self._names, self._gate, self._tally, self._plan.seed)
        with self._client() as self._eye:
            self._fresh = self._with_one_sandbox()
            for actor in self._actors:
                actor.greet()
            for actor in self._actors:
                actor.thread.start()
            journal = threading.Thread(target=self._keep_journal, name="journal", daemon=True)
            journal.start()
            try:
                self._kill_and_check()
            finally:
                self._gate.end()
            for thread in (*(actor.thread for actor in self._actors), journal):
                thread.join(HANGING_SECONDS)
                if thread.is_alive():
                    self._tally.violation(f"{thread.name} does not end")
            self._finish()
        self._site.close()
        for left in checks.settled(self._leftovers.of_everything):
            self._tally.violation(f"left when the server had ended: {left}")

    def _client(self) -> sync.Client:
        return self._site.client(tcp=False)

    def _with_one_sandbox(self) -> dict[str, int]:
        """The image is built, everything is started: how many descriptors that takes."""
        with self._eye.create_sandbox() as box:
            box.run_process("true", check=True)
        return self._leftovers.descriptors()

    # --- killing -----------------------------------------------------------------------------------------

    def _kill_and_check(self) -> None:
        until = time.monotonic() + self._plan.seconds
        while time.monotonic() < until:
            time.sleep(self._random.uniform(0.5, 3.0))
            self._leftovers.note()
            for kind in self._victims():
                victim = self._site.kill(kind, self._random)
                if victim is not None:
                    self._tally.say(f"killed {kind} {victim.pid} {victim.session}".rstrip())
            time.sleep(self._random.uniform(0.0, 1.0))
            self._check(self._touched())

    def _victims(self) -> list[str]:
        # Mostly one; now and then two at once, which is when promises are broken.
        count = self._random.choice((1, 1, 1, 2))
        return self._random.choices([*KILLS], [*KILLS.values()], k=count)

    def _touched(self) -> list[Expected]:
        """Return the sandboxes that actors worked with, and some others."""
        names = {name for actor in self._actors for name in list(actor.touched)}
        chosen = [box for box in self._names if box.name in names]
        return self._random.sample(chosen, min(5, len(chosen))) + self._random.sample(self._names, 2)

    def _check(self, chosen: list[Expected]) -> None:
        with self._gate.pause(HANGING_SECONDS) as hanging:
            for what in hanging:
                self._tally.violation(f"hangs: {what}")
            if hanging:
                return
            self._await_server()
            try:
                checks.sandboxes(self._eye, self._names, self._tally)
                checks.sessions(self._eye, self._site, self._tally)
            except SandkeepError as error:
                self._tally.violation(f"no process was killed, but the check failed: {error!r}")
            for box in chosen:
                self._look_at(box)
            for actor in self._actors:
                actor.touched.clear()
            self._tally.checked()

    def _look_at(self, box: Expected) -> None:
        with box.lock:
            usable = self._judge.attempt("check", box, self._judge.whole)
        if not usable and box.exists is True and not box.doomed:
            self._tally.violation(f"{box.name} could not be used although no process was being killed")

    def _await_server(self) -> None:
        deadline = time.monotonic() + HANGING_SECONDS
        while not self._site.serving():
            if time.monotonic() > deadline:
                self._tally.violation("the server does not come back")
                return
            time.sleep(0.05)

    # --- a client that is killed -------------------------------------------------------------------------

    def _keep_journal(self) -> None:
        count = 0
        while not self._gate.ended:
            count += 1
            pid, lines = self._site.run_client(
                self._site.url, self._site.token, CLIENT_NAME, f"c{count}", *self._acknowledged[-200:]
            )
            for line in lines:
                kind, _, rest = line.strip().partition(" ")
                if kind == "acknowledged":
                    self._acknowledged.append(rest)
                    self._tally.done("journal")
                elif kind == "violation":
                    self._tally.violation(rest)
                elif kind == "error":
                    self._tally.errors["journal", rest.partition(":")[0]] += 1
                if self._gate.ended:
                    break
            status = self._site.end_client(pid, kill=self._gate.ended)
            if status not in (-9, 1):
                self._tally.violation(f"a client ended with status {status}")

    # --- the end -----------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._tally.say("checking everything")
        self._check(self._names)
        self._tally.say("destroying everything")
        for info in list(self._eye.query_sandboxes()):
            try:
                self._eye.get_sandbox(info.name).destroy()
            except SandkeepError as error:
                self._tally.violation(f"{info.name} cannot be destroyed: {error!r}")
        for snapshot in list(self._eye.query_snapshots()):
            self._eye.delete_snapshot(snapshot.id)
        self._tally.say("looking for what is left")
        for left in checks.settled(self._leftovers.of_sessions):
            self._tally.violation(f"left when all was destroyed: {left}")
        for kind, count in self._leftovers.descriptors().items():
            if count > self._fresh.get(kind, 0) + 16:
                self._tally.violation(
                    f"{kind} has {count} open descriptors, and had {self._fresh.get(kind)} in the beginning"
                )
        self._judge.close()


def run(plan: Plan, *, quiet: bool = False, directory: str | None = None) -> Tally:
    """A whole soak; what it found."""
    tally = Tally(quiet=quiet)
    data = tempfile.mkdtemp(prefix="sandkeep-soak-", dir=directory)
    try:
        Soak(plan, data, tally).run()
    finally:
        if tally.violations:
            tally.say(f"the data directory is kept: {data}")
        else:
            shutil.rmtree(data, ignore_errors=True)
    return tally


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").strip())
    parser.add_argument("--minutes", type=float, default=20.0, help="how long there is load; 20 if not given")
    parser.add_argument("--seed", type=int, help="what is done and who is killed follows from it")
    parser.add_argument("--actors", type=int, default=8, help="half of them over TCP")
    parser.add_argument("--names", type=int, default=30, help="how many sandboxes they share")
    parser.add_argument("--directory", help="where to keep data; a temporary directory if not given")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    plan = Plan(options.minutes * 60, seed, options.actors, options.names)
    print(f"seed {seed}", flush=True)
    tally = run(plan, directory=options.directory)
    print(tally.summary())
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
