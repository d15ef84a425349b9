"""One test body, every mode: under real root here, rootless in a process of an ordinary user.

A body is a function of a ``Lab``. ``everywhere`` turns it into a test that runs once per mode::

    @pytest.fixture(scope="module", params=MODES)
    def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
        yield from opened(request)

    @everywhere
    def test_it_prints(lab: Lab) -> None:
        assert common(lab).sh("echo hello").stdout == "hello\\n"

Data directories live as long as the test run, so that an image is built once per mode. Sessions live as long
as the module's lab.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from sandkeep.linux.overlay import WAYS
from tests.conftest import IS_ROOT, User
from tests.driver_lab import Box, Lab

MODES = ("root", "subuid", "single")
BOTH_WAYS = tuple(f"{mode}/{way}" for mode in MODES for way in WAYS)
"""For ``params``: every mode with every way of mounting overlays."""
_SECONDS = 300.0

Body = Callable[[Lab], Any]


class Ask(Protocol):
    """Runs a body with the lab of one mode; what it returns travels as JSON."""

    mode: str

    def __call__(self, body: Body) -> Any: ...


def everywhere(body: Body) -> Callable[[Ask], None]:
    """A test that runs ``body`` in each mode its module's ``ask`` fixture offers."""

    def test(ask: Ask) -> None:
        ask(body)

    test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
    test.__module__ = body.__module__
    test.body = body  # type: ignore[attr-defined]
    return test


def in_modes(*modes: str, why: str) -> Callable[[Body], Callable[[Ask], None]]:
    """Like ``everywhere``, in these modes only; skipped elsewhere, saying why."""

    def decorate(body: Body) -> Callable[[Ask], None]:
        def only_there(lab: Lab) -> None:
            if lab.driver.mode not in modes:
                pytest.skip(why)
            body(lab)

        only_there.__name__, only_there.__qualname__ = body.__name__, body.__qualname__
        only_there.__doc__, only_there.__module__ = body.__doc__, body.__module__
        return everywhere(only_there)

    return decorate


def opened(request: pytest.FixtureRequest) -> Iterator[Ask]:
    """For a module's ``ask`` fixture: a lab in the mode ``request.param`` names, closed afterwards.

    With a way after a slash, as in ``root/names``, overlays are mounted that way.
    """
    mode, _, way = request.param.partition("/")
    if mode == "root":
        if not IS_ROOT:
            pytest.skip("needs real root")
        area: Path = request.getfixturevalue("test_area")
        forced: Any = way or None
        with Lab(str(area / "lab"), way=forced) as lab:
            yield _Here(lab)
        return
    user: User = request.getfixturevalue("ordinary_user" if mode == "subuid" else "single_user")
    with _Elsewhere(user, mode, way) as there:
        yield there


_common: dict[int, Box] = {}


def common(lab: Lab) -> Box:
    """A session that bodies share which leave it as they found it."""
    if id(lab) not in _common or _common[id(lab)].lab is not lab:
        _common[id(lab)] = lab.box()
    return _common[id(lab)]


class _Here:
    mode = "root"

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def __call__(self, body: Body) -> Any:
        return body(self._lab)


class _Elsewhere:
    """A lab in a process of another user, which is told the names of bodies to run."""

    def __init__(self, user: User, mode: str, way: str = "") -> None:
        self.mode = mode
        ours, theirs = socket.socketpair()
        ours.settimeout(_SECONDS)
        switch: dict[str, Any] = {"user": user.uid, "group": user.gid, "extra_groups": []} if IS_ROOT else {}
        code = "import sys; from tests.mode_runner import serve; serve(int(sys.argv[1]), *sys.argv[2:])"
        with theirs:
            self._process = subprocess.Popen(
                [user.interpreter, "-c", code, str(theirs.fileno()), str(user.home / "data"), way],
                cwd=user.home,
                env=user.environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                **switch,
            )
        self._socket = ours
        self._answers = ours.makefile("r")

    def __enter__(self) -> _Elsewhere:
        return self

    def __exit__(self, *exc: object) -> None:
        self._answers.close()
        self._socket.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def __call__(self, body: Body) -> Any:
        self._socket.sendall(json.dumps([body.__module__, body.__name__]).encode() + b"\n")
        line = self._answers.readline()
        if not line:
            pytest.fail(f"the {self.mode} lab ended with {self._process.wait(10)}", pytrace=False)
        answer = json.loads(line)
        if "skip" in answer:
            pytest.skip(answer["skip"])
        if "failure" in answer:
            pytest.fail(f"as {self.mode}:\n{answer['failure']}", pytrace=False)
        return answer["result"]


def serve(fd: int, data_dir: str, way: str) -> None:
    """The other user's side of ``_Elsewhere``: run named bodies until told no more."""
    os.set_inheritable(fd, False)
    forced: Any = way or None
    with socket.socket(fileno=fd) as sock, sock.makefile("rw") as lines, Lab(data_dir, way=forced) as lab:
        for line in lines:
            module, name = json.loads(line)
            answer: dict[str, Any] = {}
            try:
                found = getattr(importlib.import_module(module), name)
                answer = {"result": getattr(found, "body", found)(lab)}
            except pytest.skip.Exception as skipped:
                answer = {"skip": str(skipped)}
            except BaseException:
                answer = {"failure": traceback.format_exc()}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    sys.stdout.flush()
