"""Processes of a session, from both sides: as root, over a range of ids, over one id."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Iterator

import pytest

from sandkeep.errors import (
    ExecutableNotFound,
    ExecutableRefused,
    InvalidRequest,
    NotDirectory,
    NotFound,
    PathNotFound,
    PathPermission,
    SandkeepError,
    StdinUnavailable,
)
from tests.driver_lab import Box, Lab
from tests.mode_runner import MODES, Ask, common, everywhere, in_modes, opened
from tests.polling import longer_and_longer, until


@pytest.fixture(scope="module", params=MODES)
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from opened(request)


def printed(box: Box, process: str) -> bytes:
    return b"".join(getattr(item, "data", b"") for item in box.output(process))


def until_printed(box: Box, process: str, text: bytes) -> None:
    until(lambda: text in printed(box, process))


def stdin(
    box: Box, process: str, data: bytes = b"", *, offset: int | None = None, close: bool = False
) -> int:
    return box.lab.do(box.lab.driver.write_stdin(box.ref, process, data, offset=offset, close=close))


def status(box: Box, process: str) -> str:
    return str(box.lab.do(box.lab.driver.process(box.ref, process)).status)


def alive_inside(box: Box, marker: str) -> bool:
    """Whether a process with ``marker`` in its command line runs in the session."""
    lines = box.sh("for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f 2>/dev/null; echo; done").stdout
    return any(marker in line for line in lines.splitlines())


# --- what is run ---------------------------------------------------------------------------------------


@everywhere
def test_arguments_arrive_as_given(lab: Lab) -> None:
    argv = ["a b", "", "*", "$HOME", "quo'te\"", "new\nline", "ünï"]
    done = common(lab).run("python3", "-c", "import sys; print(ascii(sys.argv[1:]))", *argv)
    assert done.stdout == f"{argv!a}\n"
    assert done.record.argv[3:] == tuple(argv)


@everywhere
def test_arguments_environment_and_output_need_not_be_text(lab: Lab) -> None:
    raw = b"\xff\xfe\x80 caf\xe9"
    text = os.fsdecode(raw)
    script = "import os, sys; os.write(1, os.fsencode(sys.argv[1]) + b'|' + os.environb[b'X'] + b'\\0\\xff')"
    done = common(lab).run("python3", "-c", script, text, env={"X": text})
    assert done.output == raw + b"|" + raw + b"\0\xff"


@everywhere
def test_a_nul_byte_in_an_argument_is_refused_and_the_session_goes_on(lab: Lab) -> None:
    box = common(lab)
    for argv in (["echo", "a\0b"], ["ec\0ho"], ["\ud800"], ["/bin/\ud800"], ["echo", "\ud800"]):
        with pytest.raises(ExecutableRefused):
            box.run(*argv)
    for env in ({"A": "b\0c"}, {"A=B": "c"}, {"": "c"}):
        with pytest.raises(InvalidRequest):
            box.run("true", env=env)
    with pytest.raises(ExecutableRefused):
        box.run("true", env={"PATH": "/\ud800"})
    with pytest.raises(SandkeepError):
        box.run("true", cwd="/\ud800")
    assert box.run("true").code == 0


@everywhere
def test_the_environment_is_the_images_the_sessions_and_then_the_requests(lab: Lab) -> None:
    box = lab.box(env={"SESSION": "1", "BOTH": "session", "HOME": "/tmp"})
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    env = dict(_json(box.run("python3", "-c", script, env={"BOTH": "request", "EMPTY": ""}).stdout))
    assert (env["SESSION"], env["BOTH"], env["EMPTY"], env["HOME"]) == ("1", "request", "", "/tmp")
    assert env["USER"] == env["LOGNAME"] == "sandbox"
    assert "/usr/bin" in env["PATH"].split(":")
    assert not [name for name in env if name.startswith(("PYTEST", "SANDKEEP", "PYTHON"))]
    assert set(env) <= {
        *("SESSION", "BOTH", "EMPTY", "HOME", "USER", "LOGNAME", "PATH", "LANG", "SHELL", "LC_CTYPE")
    }


def _json(text: str) -> dict[str, str]:
    body: dict[str, str] = json.loads(text)
    return body


@everywhere
def test_a_hundred_kilobytes_of_arguments_and_a_megabyte_of_environment_pass(lab: Lab) -> None:
    argument = "x" * 100_000
    env = {f"V{number}": "y" * 100_000 for number in range(10)}
    script = (
        "import os, sys; print(len(sys.argv[1]), sum(len(v) for k, v in os.environ.items() if k[0] == 'V'))"
    )
    done = common(lab).run("python3", "-c", script, argument, env=env)
    assert done.stdout == "100000 1000000\n"
    with pytest.raises(InvalidRequest) as refused:
        common(lab).run("true", "z" * 200_000)
    assert (refused.value.errno, refused.value.field) == (errno.E2BIG, "args")
    with pytest.raises(InvalidRequest) as refused:
        common(lab).run("true", env={f"V{number}": "y" * 100_000 for number in range(70)})
    assert (refused.value.errno, refused.value.field) == (errno.E2BIG, "env")


@everywhere
def test_as_many_arguments_pass_as_the_kernel_takes_and_their_record_is_whole(lab: Lab) -> None:
    box = common(lab)
    # Two bytes each, and escaped on the way: six bytes of JSON.
    args = ["\u00e9" * 60_000] * 13 + ["\x01" * 60_000] * 7
    script = "import sys; print(len(sys.argv) - 1, sum(len(each.encode()) for each in sys.argv[1:]))"
    done = box.run("python3", "-c", script, *args)
    assert done.stdout == f"20 {13 * 120_000 + 7 * 60_000}\n"
    records = box.lab.do(box.lab.driver.processes(box.ref))
    assert any(record.argv[3:] == tuple(args) for record in records)
    assert box.sh("echo fine").stdout == "fine\n"


@everywhere
def test_the_working_directory_is_the_sessions_unless_said_otherwise(lab: Lab) -> None:
    box = common(lab)
    assert box.run("pwd").stdout == "/workspace\n"
    assert box.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    box.sh("mkdir -p below")
    assert box.run("pwd", cwd="below").stdout == "/workspace/below\n"


@everywhere
def test_each_way_of_not_starting_is_an_error_of_its_own(lab: Lab) -> None:
    box = common(lab)
    box.sh(
        "cd /tmp; printf '#!/no/such/interpreter\\n' >orphan; printf 'plain' >plain; printf 'x' >formless;"
        "printf '#!/bin/sh\\n' >script; chmod +x orphan formless; chmod -x plain script; mkdir -p closed"
    )
    with pytest.raises(ExecutableNotFound) as missing:
        box.run("no-such-program")
    assert missing.value.command == "no-such-program"
    with pytest.raises(ExecutableNotFound):
        box.run("/no/such/program")
    with pytest.raises(ExecutableNotFound):
        box.run("/etc/passwd/program")
    for name in ("/tmp/plain", "/tmp/script", "/tmp"):
        with pytest.raises(ExecutableRefused) as refused:
            box.run(name)
        assert refused.value.errno == 13
    with pytest.raises(ExecutableRefused) as refused:
        box.run("plain", env={"PATH": "/tmp"})
    assert refused.value.errno == 13
    with pytest.raises(ExecutableRefused) as refused:
        box.run("/tmp/orphan")
    assert refused.value.errno == 2 and "interpreter" in str(refused.value)
    with pytest.raises(ExecutableRefused) as refused:
        box.run("/tmp/formless")
    assert refused.value.errno == 8
    with pytest.raises(PathNotFound) as nowhere:
        box.run("true", cwd="/no/such/place")
    assert nowhere.value.path == "/no/such/place"
    with pytest.raises(NotDirectory):
        box.run("true", cwd="/etc/passwd")
    with pytest.raises(NotFound) as nobody:
        box.run("true", user="no-such-user")
    assert nobody.value.kind == "user"
    with pytest.raises(InvalidRequest):
        box.run()
    assert [p for p in box.lab.do(box.lab.driver.processes(box.ref)) if p.argv[:1] == ("/tmp/orphan",)] == []


@everywhere
def test_a_name_is_used_once_and_says_nothing_about_paths(lab: Lab) -> None:
    box = common(lab)
    box.run("true", process="only-once")
    for name in ("only-once", "", "a/b", "..", "x" * 300):
        with pytest.raises(SandkeepError):
            box.run("true", process=name or " ")
    with pytest.raises(NotFound):
        box.lab.do(box.lab.driver.process(box.ref, "never"))


@everywhere
def test_a_process_starts_with_three_descriptors_default_signals_and_a_session_of_its_own(lab: Lab) -> None:
    script = (
        "import os, signal\n"
        "fds = [fd for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "print(sorted(map(int, fds)))\n"
        "print(os.getpid() == os.getsid(0) == os.getpgid(0))\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "print(status['SigBlk'].strip(), oct(os.umask(0)))\n"
        "print(os.read(0, 10))\n"
    )
    done = common(lab).run("python3", "-I", "-c", script)
    assert done.stdout == "[0, 1, 2]\nTrue\n0000000000000000 0o22\nb''\n"
    ignored = common(lab).run("grep", "SigIgn", "/proc/self/status").stdout.split()[1]
    # The C library keeps two real-time signals to itself.
    assert int(ignored, 16) & ~(0b11 << 31) == 0


# --- as whom -------------------------------------------------------------------------------------------


@in_modes("root", "subuid", why="a session with one id has one user")
def test_a_process_runs_as_the_user_asked_for(lab: Lab) -> None:
    box = common(lab)
    assert box.run("id", "-u").stdout == "1000\n"
    assert box.run("id", "-nG").stdout.split() == ["sandbox", "sudo"]
    assert box.run("id", root=True).stdout == "uid=0(root) gid=0(root) groups=0(root)\n"
    assert box.sh("echo $HOME $USER $SUDO_USER", root=True).stdout == "/root root sandbox\n"
    assert box.run("id", "-un", user="daemon").stdout == "daemon\n"
    assert box.run("id", "-u", user=4321).stdout == "4321\n"
    assert box.run("id", user="daemon:games").stdout == "uid=1(daemon) gid=60(games) groups=60(games)\n"
    with pytest.raises(InvalidRequest):
        box.run("id", user=70_000)
    with pytest.raises(PathPermission):
        box.run("true", cwd="/root")
    assert box.sh("cat /etc/shadow").code == 1
    assert box.sh("cat /etc/shadow >/dev/null", root=True).code == 0
    # init goes back to being root each time, so what comes after is not confined by what came before.
    assert box.run("id", "-u", root=True).stdout == "0\n"


@in_modes("single", why="about sessions with one id")
def test_over_one_id_everybody_is_root_inside_and_the_user_outside(lab: Lab) -> None:
    box = common(lab)
    assert box.run("id", "-u").stdout == box.run("id", "-u", root=True).stdout == "0\n"
    sleeper = box.start("sleep", "100")
    name = box.run("sh", "-c", "grep -l '^Name:.sleep' /proc/[0-9]*/status").stdout
    assert name.count("/proc/") == 1
    owners = {os.stat(f"/proc/{pid}").st_uid for pid in _host_pids(box, "sleep")}
    assert owners == {os.getuid()}
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL, sleeper))
    box.finish(sleeper)


def _host_pids(box: Box, name: str) -> list[int]:
    """Processes called ``name`` below the session's init, as the host sees them."""
    found, pending = [], [int(box.created.init_pid)]
    while pending:
        pid = pending.pop()
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as handle:
                pending += map(int, handle.read().split())
            with open(f"/proc/{pid}/comm") as handle:
                if handle.read().strip() == name:
                    found.append(pid)
        except OSError:
            continue  # something that was run before, on its way out
    return found


# --- how it ends ---------------------------------------------------------------------------------------


@everywhere
def test_exit_codes_and_signals_are_told_apart(lab: Lab) -> None:
    box = common(lab)
    for code in (0, 1, 77, 255):
        done = box.sh(f"exit {code}")
        assert (done.code, done.record.signal, done.record.status) == (code, None, "exited")
    for number in (signal.SIGTERM, signal.SIGSEGV, signal.SIGKILL):
        done = box.sh(f"kill -{int(number)} $$")
        assert (done.code, done.record.signal, done.record.status) == (128 + number, number, "killed")
        assert done.record.reason is None and not done.record.out_of_memory
    done = box.run("python3", "-c", "t = sum(range(5_000_000))")
    assert done.record.cpu_ms is not None and done.record.finished_ms is not None
    assert done.record.cpu_ms > 20 and done.record.duration_ms >= 20
    assert done.record.finished_ms >= done.record.started_ms


@everywhere
def test_a_signal_reaches_the_whole_process_group_and_nobody_else(lab: Lab) -> None:
    box = common(lab)
    other = box.start("sleep", "100")
    script = 'sleep 77 & sleep 78 & trap "echo got it; exit 3" TERM; echo ready; wait; wait'
    process = box.start("bash", "-c", script)
    until_printed(box, process, b"ready")
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGTERM, process))
    done = box.finish(process)
    assert (done.stdout, done.code) == ("ready\ngot it\n", 3)
    until(lambda: not alive_inside(box, "sleep 77") and not alive_inside(box, "sleep 78"))
    assert status(box, other) == "running"
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL, other))
    ended = box.finish(other)
    assert (ended.code, ended.record.reason) == (137, "killed by request")
    # To something that has ended: nothing happens.
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGTERM, other))
    for number in (0, 65, -9):
        with pytest.raises(InvalidRequest):
            box.lab.do(box.lab.driver.signal(box.ref, number, other))


@everywhere
def test_a_signal_to_everything_spares_only_init(lab: Lab) -> None:
    box = lab.box()
    processes = [box.start("sleep", "100") for _ in range(3)]
    box.sh("setsid -f sleep 88")
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL))
    assert [box.finish(process).code for process in processes] == [137, 137, 137]
    until(lambda: not alive_inside(box, "sleep 88"))
    assert box.run("true").code == 0


@everywhere
def test_orphans_are_reaped(lab: Lab) -> None:
    box = lab.box()
    box.sh("for i in 1 2 3 4 5 6 7 8; do (setsid sh -c 'sleep 0.05 &' &) ; done")
    time.sleep(0.2)
    until(lambda: box.sh("cat /proc/[0-9]*/stat 2>/dev/null | grep -c ' Z '").stdout == "0\n")


DAEMON = (
    "import os, sys, time\n"
    "for _ in range(2):\n"
    "    if os.fork(): break\n"
    "    os.setsid()\n"
    "else:\n"
    "    print('daemon', flush=True)\n"
    "    while True: time.sleep(0.01); open('/tmp/beat-' + sys.argv[1], 'w').write(str(time.time()))\n"
    "print('main', flush=True)\n"
    "time.sleep(float(sys.argv[2]))\n"
)


def _beats(box: Box, name: str) -> bool:
    def last() -> str:
        return box.sh(f"cat /tmp/beat-{name} 2>/dev/null").stdout

    before = last()
    time.sleep(0.1)
    return last() != before


@everywhere
def test_kill_after_ends_every_descendant_and_keeps_what_was_printed(lab: Lab) -> None:
    """Also those that left the session and the process group and were adopted by init."""
    box = common(lab)
    for limit in longer_and_longer(700):
        started = time.monotonic()
        done = box.run("python3", "-c", DAEMON, "killed", "100", kill_after_ms=limit)
        assert limit / 1000 - 0.1 < time.monotonic() - started < 80
        assert (done.code, done.record.reason) == (137, "time limit reached")
        if len(done.stdout.split()) == 3 and box.sh("test -e /tmp/beat-killed").code == 0:
            break
    assert sorted(done.stdout.split()) == ["daemon", "main", "main"]
    until(lambda: not _beats(box, "killed"))
    until(lambda: not alive_inside(box, "beat-"))
    assert box.run("true").code == 0


LINGERING = (
    "trap 'echo main told; exit 7' TERM\n"
    "(setsid setsid bash -c \"trap 'echo daemon told' TERM; echo up\n"
    '   while :; do sleep 0.05; done" stays$1 &)\n'
    "echo up; while :; do sleep 0.05; done\n"
)
"""Ends by itself when it is told to, and leaves a daemon that does not."""


@everywhere
def test_a_grace_period_comes_before_the_kill_and_no_descendant_survives_it(lab: Lab) -> None:
    """Also the daemon of a process that ended in its grace period."""
    box = common(lab)
    for limit in longer_and_longer(700):
        done = box.run("bash", "-c", LINGERING, "x", "limit", kill_after_ms=limit, grace_ms=500)
        if done.stdout.count("up") == 2:
            break
    assert (done.code, done.record.status, done.record.reason) == (7, "exited", "time limit reached")
    assert "main told" in done.stdout
    until(lambda: not alive_inside(box, "stayslimit"))
    assert "daemon told" in printed(box, done.record.id).decode()

    process = box.start("bash", "-c", LINGERING, "x", "kill")
    until(lambda: printed(box, process).count(b"up") == 2)
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGTERM, process, grace_ms=500))
    assert box.finish(process).code == 7
    until(lambda: not alive_inside(box, "stayskill"))
    assert b"daemon told" in printed(box, process)

    stubborn = box.start("bash", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done")
    until_printed(box, stubborn, b"up")
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGTERM, stubborn, grace_ms=300))
    ended = box.finish(stubborn)
    assert (ended.code, ended.record.reason) == (137, "killed by request")


@everywhere
def test_kill_after_holds_for_descendants_of_a_process_that_ended_in_time(lab: Lab) -> None:
    box = common(lab)
    for limit in longer_and_longer(2000):
        # Exited in time and beating afterwards, unless the limit came first.
        over = time.monotonic() + limit / 1000
        done = box.run("python3", "-c", DAEMON, "survivor", "0", kill_after_ms=limit)
        while not (beats := _beats(box, "survivor")) and time.monotonic() < over:
            pass
        if beats:
            break
    assert beats
    assert (done.code, done.record.status) == (0, "exited")
    until(lambda: not _beats(box, "survivor"))
    until(lambda: not alive_inside(box, "beat-"))


@everywhere
def test_killing_what_holds_a_process_does_not_let_it_escape(lab: Lab) -> None:
    """With resource limits a process of ours stands between init and the command; root can kill it."""
    box = common(lab)
    script = "(setsid sleep 4321 &); kill -9 $PPID 2>/dev/null; while :; do sleep 0.1; done"
    done = box.run("bash", "-c", script, root=True, rlimits={"nofile": 100}, kill_after_ms=60_000)
    assert done.code == 137
    until(lambda: not alive_inside(box, "sleep 4321"))


@everywhere
def test_a_kill_ends_every_descendant(lab: Lab) -> None:
    """Also a daemon: in a session of its own, and with no parent left but init."""
    box = common(lab)
    other = box.start("python3", "-c", DAEMON, "other", "100")
    until(lambda: box.sh("test -e /tmp/beat-other").code == 0)
    for limits in ({}, {"rlimits": {"nofile": 100}}):
        doomed = box.start("python3", "-c", DAEMON, "doomed", "100", **limits)
        until(lambda: box.sh("test -e /tmp/beat-doomed").code == 0)
        box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL, doomed))
        done = box.finish(doomed)
        assert (done.code, done.record.reason) == (137, "killed by request")
        until(lambda: not alive_inside(box, "doomed"))
        assert box.sh("rm /tmp/beat-doomed").code == 0
    assert status(box, other) == "running"
    until(lambda: _beats(box, "other"))
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL, other))
    until(lambda: not alive_inside(box, "other"))


@everywhere
def test_a_shell_is_killed_before_what_it_waits_for(lab: Lab) -> None:
    """Otherwise it would go on with its next command, or end by itself with its child's code."""
    box = common(lab)
    for turn in range(20):
        process = box.start("sh", "-c", f"sleep 77 & sleep 77 & sleep 77; touch /tmp/went-on-{turn}")
        until(lambda: alive_inside(box, "sleep 77"))
        box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL, process))
        assert box.finish(process).record.status == "killed"
        until(lambda: not alive_inside(box, "sleep 77"))
    assert box.sh("ls /tmp | grep went-on").stdout == ""


@everywhere
def test_a_termination_reaches_every_descendant(lab: Lab) -> None:
    """Each gets the signal, once, and what it does about it is its own business."""
    box = common(lab)
    told = "trap 'echo told $0 >>/tmp/told; exit 0' TERM; echo $0 >>/tmp/up; while :; do sleep 0.05; done"
    script = f'(setsid setsid bash -c "$1" daemon &); setsid bash -c "$1" session & {told}'
    process = box.start("bash", "-c", script, "main", told)
    until(lambda: box.sh("wc -l </tmp/up").stdout == "3\n")
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGTERM, process))
    assert box.finish(process).code == 0
    until(lambda: len(box.sh("cat /tmp/told").stdout.splitlines()) >= 3)
    assert sorted(box.sh("cat /tmp/told").stdout.splitlines()) == ["told daemon", "told main", "told session"]
    box.sh("rm /tmp/told /tmp/up")


@everywhere
def test_kill_after_spares_other_processes_and_its_own_past(lab: Lab) -> None:
    box = common(lab)
    other = box.start("sleep", "100")
    for limit in longer_and_longer(300):
        over = time.monotonic() + limit / 1000
        if (in_time := box.run("true", kill_after_ms=limit).code) == 0:
            break
    assert in_time == 0
    assert box.run("sleep", "100", kill_after_ms=100).code == 137
    time.sleep(max(over - time.monotonic(), 0) + 0.1)
    assert status(box, other) == "running"
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL, other))
    box.finish(other)
    for nonsense in ("soon", -1, float("inf")):
        with pytest.raises(InvalidRequest):
            box.run("true", kill_after_ms=nonsense)


@everywhere
def test_an_exit_is_reported_while_a_background_child_holds_the_pipe(lab: Lab) -> None:
    """And the child goes on: it can still write, is not killed by SIGPIPE, and what it writes is kept."""
    box = common(lab)
    child = "until [ -e /tmp/go-on ]; do sleep 0.02; done; echo later; sleep 0.1; echo alive >/tmp/after"
    process = box.start("bash", "-c", f"({child}) & echo first; exit 5")
    done = box.finish(process)
    assert (done.code, done.stdout) == (5, "first\n")
    box.write("/tmp/go-on", b"")
    until_printed(box, process, b"later\n")
    until(lambda: box.sh("cat /tmp/after 2>/dev/null").stdout == "alive\n")
    assert printed(box, process) == b"first\nlater\n"
    # Following it again still ends at once: the process itself is over.
    assert box.finish(process).code == 5


# --- standard input ------------------------------------------------------------------------------------


@everywhere
def test_input_arrives_in_order_and_ends_when_closed(lab: Lab) -> None:
    box = common(lab)
    process = box.start("cat", stdin=True)
    assert stdin(box, process, b"one ") == 4
    assert stdin(box, process, b"two", close=True) == 7
    done = box.finish(process)
    assert (done.stdout, done.code) == ("one two", 0)


@everywhere
def test_a_piece_sent_again_is_taken_once_and_a_hole_is_refused(lab: Lab) -> None:
    box = common(lab)
    process = box.start("cat", stdin=True)
    assert stdin(box, process, b"abcdef", offset=0) == 6
    assert stdin(box, process, b"abcdef", offset=0) == 6
    assert stdin(box, process, b"defghi", offset=3) == 9
    with pytest.raises(InvalidRequest):
        stdin(box, process, b"z", offset=10)
    assert stdin(box, process, b"", offset=9, close=True) == 9
    with pytest.raises(StdinUnavailable):
        stdin(box, process, b"more")
    assert box.finish(process).stdout == "abcdefghi"


@everywhere
def test_a_piece_sent_again_after_the_input_was_closed_is_not_refused(lab: Lab) -> None:
    box = common(lab)
    process = box.start("sleep", "100", stdin=True)
    assert stdin(box, process, b"abcdef", offset=0, close=True) == 6
    assert stdin(box, process, b"def", offset=3) == 6
    for data, offset in ((b"def!", 3), (b"", 6), (b"g", 6)):
        with pytest.raises(StdinUnavailable):
            stdin(box, process, data, offset=offset)
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL, process))
    box.finish(process)


@everywhere
def test_how_much_input_has_arrived_is_told_also_after_the_end(lab: Lab) -> None:
    def told(process: str) -> tuple[int, bool]:
        report = box.lab.do(box.lab.driver.input(box.ref, process))
        return report.received, report.open

    box = common(lab)
    process, unread = box.start("cat", stdin=True), box.start("sleep", "100", stdin=True)
    assert told(process) == (0, True)
    stdin(box, process, b"abcdef")
    assert told(process) == (6, True)
    stdin(box, process, b"", close=True)
    box.finish(process)
    assert told(process) == (6, False)
    stdin(box, unread, b"abc", close=True)
    assert told(unread) == (3, False)
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL, unread))
    box.finish(unread)
    without = box.start("true")
    with pytest.raises(StdinUnavailable):
        told(without)


@everywhere
def test_input_a_process_does_not_want_is_an_error_and_no_harm(lab: Lab) -> None:
    box = common(lab)
    without = box.start("sleep", "100")
    with pytest.raises(StdinUnavailable):
        stdin(box, without, b"x")
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL, without))
    box.finish(without)
    with pytest.raises(StdinUnavailable):
        stdin(box, without, b"x")
    closing = box.start("bash", "-c", "exec 0<&-; echo closed; sleep 100", stdin=True)
    until_printed(box, closing, b"closed")
    with pytest.raises(StdinUnavailable):
        stdin(box, closing, b"x" * 100_000)
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL, closing))
    box.finish(closing)
    # More than a pipe holds, to a process that never reads and then dies.
    deaf = box.start("sleep", "0.3", stdin=True)
    with pytest.raises(StdinUnavailable):
        stdin(box, deaf, b"x" * 1_000_000, close=True)
    assert box.run("true").code == 0


@everywhere
def test_much_input_flows_at_the_readers_pace(lab: Lab) -> None:
    box = common(lab)
    process = box.start("sh", "-c", "sleep 0.2; wc -c", stdin=True)
    data = b"0123456789abcdef" * 65_536
    assert stdin(box, process, data) == 1 << 20
    assert stdin(box, process, data, close=True) == 2 << 20
    assert box.finish(process).stdout.split() == [str(2 << 20)]


# --- terminals -----------------------------------------------------------------------------------------


@everywhere
def test_a_terminal_has_the_size_asked_for_and_tells_when_it_changes(lab: Lab) -> None:
    box = common(lab)
    script = 'trap "stty size; exit 4" WINCH; stty size; while :; do sleep 0.02; done'
    process = box.start("bash", "-c", script, pty=(37, 101))
    until_printed(box, process, b"37 101")
    box.lab.do(box.lab.driver.resize(box.ref, process, rows=50, columns=120))
    done = box.finish(process)
    assert (done.stdout, done.code) == ("37 101\r\n50 120\r\n", 4)
    plain = box.start("sleep", "100")
    with pytest.raises(InvalidRequest):
        box.lab.do(box.lab.driver.resize(box.ref, plain, rows=50, columns=120))
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL, plain))
    box.finish(plain)
    for size in ((0, 10), (10, 70_000)):
        with pytest.raises(InvalidRequest):
            box.run("true", pty=size)


@everywhere
def test_the_last_words_on_a_terminal_are_kept(lab: Lab) -> None:
    """They are still on their way through the kernel when their writer ends."""
    box = common(lab)
    for _ in range(20):
        done = box.run("sh", "-c", "head -c 30000 /dev/zero | tr '\\0' x", pty=(24, 80))
        assert (done.code, done.output.count(b"x")) == (0, 30_000)


@everywhere
def test_a_terminal_is_the_controlling_one_and_belongs_to_the_user(lab: Lab) -> None:
    script = "tty; echo aloud >/dev/tty; stat -c %U $(tty); test -t 0 && test -t 1 && test -t 2 && echo all"
    done = common(lab).run("bash", "-c", script, pty=(24, 80))
    lines = done.stdout.split("\r\n")
    assert re.fullmatch(r"/dev/pts/\d+", lines[0])
    owner = "root" if lab.driver.mode == "single" else "sandbox"
    assert lines[1:] == ["aloud", owner, "all", ""]


@everywhere
def test_a_terminal_echoes_edits_and_ends_input(lab: Lab) -> None:
    box = common(lab)
    process = box.start("cat", pty=(24, 80))
    stdin(box, process, b"helo\x7flo\n")
    until_printed(box, process, b"hello\r\n")
    stdin(box, process, b"\x04")
    done = box.finish(process)
    assert done.code == 0
    assert done.output == b"helo\x08 \x08lo\r\nhello\r\n"
    closed = box.start("cat", pty=(24, 80))
    stdin(box, closed, b"bye\n", close=True)
    assert box.finish(closed).code == 0


@everywhere
def test_control_c_interrupts_the_job_in_front_and_not_the_shell(lab: Lab) -> None:
    box = common(lab)
    process = box.start("bash", "--norc", "-i", pty=(24, 80), env={"PS1": "> ", "TERM": "dumb"})
    until_printed(box, process, b"> ")
    stdin(box, process, b"sleep 1000\n")
    until(lambda: alive_inside(box, "sleep 1000"))

    def interrupted(command: str) -> bool:
        # A job runs, or is named, before the shell hands over the terminal, so once may be too early.
        stdin(box, process, b"\x03")
        return not alive_inside(box, command)

    until(lambda: interrupted("sleep 1000"))
    until(lambda: printed(box, process).endswith(b"> "))
    stdin(box, process, b"echo code $?\n")

    def until_prompted_after(text: bytes) -> None:
        # What is typed before the shell is ready for it is echoed twice.
        until(lambda: (shown := printed(box, process).rpartition(text)[2]) and shown.endswith(b"> "))

    until_prompted_after(b"code 130")
    stdin(box, process, b"sleep 1001\n")
    until(lambda: alive_inside(box, "sleep 1001"))

    def stopped() -> bool:
        stdin(box, process, b"\x1a")
        return b"Stopped" in printed(box, process)

    until(stopped)
    until_prompted_after(b"Stopped")
    stdin(box, process, b"fg\n")
    # Typed, shown as stopped, and named again when resumed. An interrupt before that would discard the "fg".
    until(lambda: printed(box, process).count(b"sleep 1001") == 3)

    until(lambda: interrupted("sleep 1001"))
    stdin(box, process, b"exit 6\n")
    done = box.finish(process)
    assert b"no job control" not in done.output
    assert done.code == 6


@everywhere
def test_losing_a_terminal_with_input_on_its_way_is_no_harm(lab: Lab) -> None:
    box = common(lab)
    process = box.start("bash", "-c", "stty raw -echo; echo raw; sleep 0.5", pty=(24, 80))
    until_printed(box, process, b"raw")
    with pytest.raises(StdinUnavailable):
        stdin(box, process, b"x" * 500_000, close=True)
    assert box.finish(process).code == 0
    assert box.run("true").code == 0


@everywhere
def test_terminals_run_out_with_an_error_and_come_back(lab: Lab) -> None:
    box = lab.box()
    processes = []
    with pytest.raises(SandkeepError) as refused:
        for _ in range(70):
            processes.append(box.start("sleep", "100", pty=(24, 80)))
    assert len(processes) == 64 and refused.value.errno == 28
    box.lab.do(box.lab.driver.signal(box.ref, signal.SIGKILL))
    for process in processes:
        box.finish(process)
    until(lambda: box.sh("ls /dev/pts").stdout.split() == ["ptmx"])
    assert box.run("true", pty=(24, 80)).code == 0


# --- limits and many at once ---------------------------------------------------------------------------


@everywhere
def test_limits_of_one_process_hold_for_it_alone(lab: Lab) -> None:
    box = common(lab)
    limits = {"nofile": 123, "fsize": 4096, "core": 0}
    done = box.sh("ulimit -n; ulimit -f; ulimit -c", rlimits=limits)
    assert done.stdout.split() == ["123", "4", "0"]
    assert box.sh("ulimit -n").stdout.strip() != "123"
    done = box.run("python3", "-c", "open('/tmp/big', 'wb').write(b'x' * 10000)", rlimits={"fsize": 4096})
    assert "File too large" in done.stderr and done.code == 1
    done = box.run("python3", "-c", "while True: pass", rlimits={"cpu": 1})
    assert done.record.signal in (signal.SIGXCPU, signal.SIGKILL)
    for wrong in ({"stack": 1}, {"cpu": "much"}):
        with pytest.raises(InvalidRequest):
            box.run("true", rlimits=wrong)
    done = box.sh("(sleep 30; echo later) & echo now", rlimits=limits)
    assert done.stdout == "now\n"


@everywhere
def test_two_hundred_processes_at_once(lab: Lab) -> None:
    box = lab.box()
    script = "read line; echo $line $1"
    processes = [box.start("sh", "-c", script, "sh", str(number), stdin=True) for number in range(200)]
    running = [p for p in box.lab.do(box.lab.driver.processes(box.ref)) if p.status == "running"]
    assert len(running) == 200
    for process in processes:
        stdin(box, process, b"hello\n")
    for number, process in enumerate(processes):
        assert box.finish(process).stdout == f"hello {number}\n"
