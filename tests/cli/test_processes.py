"""Processes that run and that did: listed, read from any place, signalled."""

from __future__ import annotations

import time

from tests.cli.program import Program
from tests.polling import ENOUGH, until


def test_processes_are_listed_with_how_they_ended(cli: Program, box: str) -> None:
    assert "no process was started" in cli("ps", box).err
    cli("exec", box, "--", "sh", "-c", "exit 3", status=3)
    (found,) = cli("ps", box, "--json").json
    assert (found["status"], found["returncode"], found["command"]) == ("exited", 3, "sh")
    assert "sh -c 'exit 3'" in cli("ps", box).text
    cli("stop", box)
    cli("exec", box, "true")
    assert [each["command"] for each in cli("ps", "--json", box).json] == ["true"]
    assert [each["command"] for each in cli("ps", "--json", "--all", box).json] == ["true", "sh"]
    assert [each["command"] for each in cli("ps", "--json", "--session", found["sessionId"], box).json] == [
        "sh"
    ]


def test_logs_are_read_from_any_offset_long_after(cli: Program, box: str) -> None:
    cli("exec", box, "--", "sh", "-c", "printf 0123456789; sleep 0.1; printf error >&2")
    process = cli("ps", box, "--json").json[0]["id"]
    cli("stop", box)
    done = cli("logs", box, process)
    assert (done.text, done.err) == ("0123456789", "error")
    assert cli("logs", box, process, "--since-offset", "7").text == "789"
    records = cli("logs", "--json", box, process).lines
    assert [(each["offset"], each["stream"], each["text"]) for each in records] == [
        (0, "stdout", "0123456789"),
        (10, "stderr", "error"),
    ]
    assert records[-1]["end"] == 15


def test_a_detached_command_runs_on_and_its_id_is_printed(cli: Program, box: str) -> None:
    process = cli("exec", "-d", "--metadata", "step=3", box, "--", "sh", "-c", "echo begun; sleep 60").text
    assert process.startswith("cmd_") and process.endswith("\n")
    (found,) = cli("ps", "--json", "--metadata", "step=3", box).json
    assert (found["id"], found["status"], found["metadata"]) == (process.strip(), "running", {"step": "3"})
    assert "has this metadata" in cli("ps", "--metadata", "step=4", box).err
    follower = cli.start("logs", "-f", box, process.strip())
    assert follower.stdout is not None and follower.stdout.readline() == b"begun\n"
    cli("kill", "-s", "KILL", box, process.strip())
    assert follower.wait(ENOUGH) == 0
    follower.communicate()
    assert "--detach" in cli.fails("exec", "-d", "-i", box, "cat", status=2)
    assert "--interactive" in cli.fails("exec", "--detachable", box, "cat", status=2)
    assert "terminals" in cli.fails("exec", "-i", "--detachable", box, "cat", status=2)
    assert "sandkeep logs -f" in cli.fails("attach", box, status=2)


def test_the_last_lines_of_a_log(cli: Program, box: str) -> None:
    cli("exec", "-d", box, "--", "sh", "-c", r"printf 'one\ntwo\nth'; printf 'ree\nfour'; sleep 60")
    until(lambda: cli("logs", box).text.endswith("four"))
    for tail, text in ((0, ""), (1, "four"), (2, "three\nfour"), (9, "one\ntwo\nthree\nfour")):
        assert cli("logs", "--tail", str(tail), box).text == text
    (record,) = cli("logs", "--json", "-n", "1", box).lines
    assert (record["offset"], record["end"], record["text"]) == (14, 18, "four")
    follower = cli.start("logs", "--tail", "2", "-f", box)
    assert follower.stdout is not None and follower.stdout.readline() == b"three\n"
    cli("kill", "-s", "KILL", box)
    assert follower.stdout.read() == b"four"
    follower.communicate()


def test_the_log_since_a_time(cli: Program, box: str) -> None:
    script = "echo early; until [ -e go ]; do sleep 0.05; done; echo late"
    process = cli("exec", "-d", box, "--", "sh", "-c", script).text.strip()
    until(lambda: cli("logs", box, process).text)
    cli("exec", box, "touch", "go")
    early, late = cli("logs", "-f", "--json", box, process).lines
    assert cli("logs", "--since", late["time"], box, process).text == "late\n"
    assert cli("logs", "--since", early["time"], "--tail", "1", box, process).text == "late\n"
    assert cli("logs", "--since", "1h", "-f", box, process).text == "early\nlate\n"
    assert cli("logs", "--since", "2200-01-31T12:00", box, process).text == ""
    assert "neither a time nor a duration" in cli.fails("logs", "--since", "yesterday", box, status=2)


def test_multibyte_characters_are_not_split(cli: Program, box: str) -> None:
    cli("exec", box, "--", "sh", "-c", r"printf '\303'; sleep 0.3; printf '\251'")
    assert "".join(each["text"] for each in cli("logs", "--json", box).lines) == "é"


def test_logs_are_followed_until_the_process_is_killed(cli: Program, box: str) -> None:
    running = cli.start("exec", box, "--", "sh", "-c", "echo begun; sleep 60")
    assert running.stdout is not None and running.stdout.readline() == b"begun\n"
    follower = cli.start("logs", "-f", box)
    assert follower.stdout is not None and follower.stdout.readline() == b"begun\n"
    assert cli("logs", box).text == "begun\n"
    killed = cli("kill", "--json", "-s", "KILL", box).json
    assert killed == {"process": cli("ps", box, "--json").json[0]["id"], "signal": "KILL"}
    assert follower.wait(ENOUGH) == 0
    assert running.wait(ENOUGH) == 137
    follower.communicate()
    running.communicate()


def test_a_signal_by_number_or_name(cli: Program, box: str) -> None:
    running = cli.start("exec", box, "--", "sh", "-c", "trap 'exit 9' USR1; echo begun; sleep 60 & wait")
    assert running.stdout is not None and running.stdout.readline() == b"begun\n"
    assert "is not a signal" in cli.fails("kill", box, "-s", "NOSUCH", status=2)
    cli("kill", box, "--signal", "sigusr1")
    assert running.wait(ENOUGH) == 9
    running.communicate()


def test_a_missing_process_is_reported(cli: Program, box: str) -> None:
    assert f"sandkeep ps {box} --all" in cli.fails("logs", box)
    assert f"sandkeep ps {box} --all" in cli.fails("logs", box, "cmd_none")
    assert "no process runs" in cli.fails("kill", box)
    cli.fails("ps", "no-such-sandbox")


def test_an_interrupted_follower_ends_with_130(cli: Program, box: str) -> None:
    import signal

    running = cli.start("exec", box, "--", "sh", "-c", "echo begun; sleep 60")
    assert running.stdout is not None and running.stdout.readline() == b"begun\n"
    follower = cli.start("logs", "-f", box)
    assert follower.stdout is not None and follower.stdout.readline() == b"begun\n"
    time.sleep(0.2)
    follower.send_signal(signal.SIGINT)
    assert follower.wait(ENOUGH) == 130
    assert follower.communicate()[1].strip() == b""
    assert cli("ps", box, "--json").json[0]["status"] == "running"
    running.send_signal(signal.SIGTERM)
    running.wait(ENOUGH)
    running.communicate()
