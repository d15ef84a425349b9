"""The parts of the SDK that wait for nothing: targets, retries, frames, archives, requests."""

from __future__ import annotations

import io
import os
import tarfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkeep import Resources, SnapshotRetention, embedded
from sandkeep.errors import (
    ArchiveError,
    InvalidRequest,
    RequestTimeout,
    ServerUnreachable,
    StdinStalled,
    StreamClosed,
    TransportError,
)
from sandkeep.sdk import bodies, local, output, retry, tarball, target
from sandkeep.sdk.address import SocketPath
from sandkeep.sdk.values import OutputChunk, OutputGap, Transferred
from sandkeep.shared.tarreader import TarFeed
from sandkeep.sync.streams import StdinWriter
from sandkeep.wire import errors, frames


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is needed here."""
    for variable in ("SANDKEEP_URL", "SANDKEEP_TOKEN", "SANDKEEP_TEAM", "SANDKEEP_PROJECT"):
        monkeypatch.delenv(variable, raising=False)


# --- where the server is -------------------------------------------------------------------------------


def test_without_a_url_it_is_the_embedded_server_of_the_data_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SANDKEEP_HOME", "/some/where")
    found = target.resolve(None, None, None, None)
    assert (found.embedded, found.socket) == ("/some/where", "/some/where/server.sock")
    assert os.path.basename(str(found.socket)) == embedded.SOCKET


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDKEEP_URL", "https://one.example/api/")
    monkeypatch.setenv("SANDKEEP_TOKEN", "secret")
    monkeypatch.setenv("SANDKEEP_TEAM", "us")
    monkeypatch.setenv("SANDKEEP_PROJECT", "blue")
    found = target.resolve(None, None, None, None)
    assert (found.url, found.token, found.project) == ("https://one.example/api", "secret", "blue")
    assert found.scope == {"teamId": "us", "projectId": "blue", "project": "blue"}
    assert "secret" not in repr(found)
    assert target.resolve("http://two.example", None, None, "red").project == "red"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "unix://relative", "http://x/?q=1", "nonsense"])
def test_what_is_not_a_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        target.resolve(url, None, None, None)
    assert refused.value.field == "url"


def test_sockets_with_long_paths_are_reached(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["x" * 40] * 4)
    deep.mkdir(parents=True)
    (deep / "server.sock").touch()
    address = SocketPath(str(deep / "server.sock"))
    assert len(address.path) < 108 and os.path.exists(address.path)
    address.close()
    assert SocketPath("/short").path == "/short"


# --- repeating -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 425, 429])
def test_what_the_server_did_not_look_at_is_repeated(status: int) -> None:
    assert retry.after_status(1, status, {}, replay=False) is not None


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_what_may_have_been_done_is_repeated_only_where_that_changes_nothing(status: int) -> None:
    assert retry.after_status(1, status, {}, replay=False) is None
    assert retry.after_status(1, status, {}, replay=True) is not None


@pytest.mark.parametrize("status", [400, 401, 404, 409, 410, 422])
def test_refusals_are_not_repeated(status: int) -> None:
    assert retry.after_status(1, status, {}, replay=True) is None


def test_a_server_that_says_when_is_asked_then_unless_that_is_too_late() -> None:
    assert retry.after_status(1, 429, {"retry-after": "3"}, replay=False) == 3.0
    assert retry.after_status(1, 429, {"retry-after": "300"}, replay=False) is None


def test_nothing_is_repeated_for_ever() -> None:
    assert retry.after_status(retry.ATTEMPTS, 503, {}, replay=True) is None


def test_a_server_that_is_away_is_tried_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("sandkeep.sdk.retry.time.monotonic", lambda: now)
    patience, tries = retry.Patience(), 0
    with pytest.raises(ServerUnreachable) as away:
        while True:
            patience.attempt()
            now += patience.after(ServerUnreachable("away", url="u"), retry.OUTAGE_SECONDS)
            tries += 1
    assert retry.OUTAGE_SECONDS - 1 < now <= retry.OUTAGE_SECONDS
    assert away.value.tries == tries + 1 and away.value.url == "u" and away.value.hint
    assert f"tried {tries + 1} times" in away.value.message


def test_a_failure_that_is_not_to_be_repeated_is_raised_as_it_was() -> None:
    away = ServerUnreachable("away")
    with pytest.raises(ServerUnreachable) as raised:
        retry.Patience().after(away, 0.0)
    assert raised.value is away
    with pytest.raises(ServerUnreachable):
        retry.Patience(within=0.0).after(away, retry.OUTAGE_SECONDS)


def test_a_server_that_was_at_work_has_been_away_only_since(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("sandkeep.sdk.retry.time.monotonic", lambda: now)
    patience, lost = retry.Patience(), StreamClosed("lost")
    for _ in range(retry.ATTEMPTS):
        patience.attempt()
        now += retry.OUTAGE_SECONDS  # it works on it for so long, and goes away
        now += patience.after(lost, retry.OUTAGE_SECONDS)
    patience.attempt()
    now += 2 * retry.OUTAGE_SECONDS
    with pytest.raises(StreamClosed):
        patience.after(lost, retry.OUTAGE_SECONDS)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_with_nobody_behind_it_is_told_from_a_server_that_refuses(status: int) -> None:
    html = errors.exception(status, b"<html>Bad Gateway</html>")
    ours = errors.exception(status, errors.error_response(StreamClosed("x")).body)
    other = errors.exception(status, b'{"error": {"code": "bad_gateway", "message": "x"}}')
    assert retry.server_away(status, html)
    assert not retry.server_away(status, ours) and not retry.server_away(status, other)
    assert not retry.server_away(500, errors.exception(500, b"<html>"))


def test_a_stream_is_opened_again_so_often_in_a_row_and_then_its_failure_is_raised() -> None:
    again = retry.Reconnecting()

    lost = StreamClosed("lost")
    for _ in range(2):
        assert all(again.after(lost) > 0 for _ in range(2 * retry.ATTEMPTS))
        again.heard()
    for _ in range(2 * retry.ATTEMPTS):
        again.after(lost)
    with pytest.raises(StreamClosed, match="lost"):
        again.after(lost)


def test_a_stream_whose_connections_are_lost_is_opened_again_for_as_long_as_a_restart_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("sandkeep.sdk.retry.time.monotonic", lambda: now)
    again = retry.Reconnecting()
    for _ in range(2):
        now = began = now + 1.0
        with pytest.raises(TransportError) as lost:
            while True:
                now += again.after(TransportError("lost"))
        assert retry.OUTAGE_SECONDS - 1 < now - began <= retry.OUTAGE_SECONDS
        assert lost.value.tries > 2 * retry.ATTEMPTS
        again.heard()
    away = ServerUnreachable("it was waited for already")
    with pytest.raises(ServerUnreachable):
        again.after(away)


# --- output frames -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=50)), max_size=8), st.data())
def test_frames_are_read_however_they_were_cut(chunks: list[tuple[int, bytes]], data: st.DataObject) -> None:
    wire, offset = bytearray(), 0
    for stream, content in chunks:
        wire += frames.HEADER.pack(len(content), stream, 1_000_000, offset) + content
        offset += len(content)
        wire += frames.HEARTBEAT
    wire += frames.HEADER.pack(8, frames.GAP, 0, offset) + (99).to_bytes(8, "little")
    wire += frames.HEADER.pack(0, frames.END, 0, offset + 99)
    reader, items = output.FrameReader(), []
    while wire:
        size = data.draw(st.integers(1, len(wire)))
        items += list(reader.feed(bytes(wire[:size])))
        del wire[:size]
    found = [item for item in items if isinstance(item, OutputChunk)]
    assert [(1 if item.stream.value == "stdout" else 2, item.data) for item in found] == chunks
    assert items[-2:] == [OutputGap(offset, 99), output.OutputEnd(offset + 99)]


# --- archives ------------------------------------------------------------------------------------------

NAMES = ["plain", "dir/ünï", "dir/" + "long" * 60, "dir/\udcff\udcfe"]


def test_archives_are_what_tar_reads(tmp_path: Path) -> None:
    data = b"".join(tarball.file(name, name.encode("utf-8", "surrogateescape"), 0o640) for name in NAMES)
    with tarfile.open(fileobj=io.BytesIO(data + tarball.END)) as archive:
        assert [entry.name for entry in archive] == NAMES
        assert {entry.mode for entry in archive} == {0o640}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("step", [1, 7, 512, 100_000])
def test_trees_are_written_from_what_tar_writes_however_it_was_cut(
    tmp_path: Path, form: int, step: int
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, errors="surrogateescape") as archive:
        directory = tarfile.TarInfo("dir")
        directory.type, directory.mode = tarfile.DIRTYPE, 0o500
        archive.addfile(directory)
        for name in NAMES:
            entry = tarfile.TarInfo(name)
            entry.size = 1000
            archive.addfile(entry, io.BytesIO(b"x" * 1000))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    steps: list[Transferred] = []
    writer = local.TreeWriter(str(tmp_path / "out"), steps.append)
    data = buffer.getvalue()
    for start in range(0, len(data), step):
        writer.write(data[start : start + step])
    writer.finish()
    assert (writer.files, writer.bytes) == (4, 4000) and steps[-1].files == 4
    assert all((tmp_path / "out" / name).read_bytes() == b"x" * 1000 for name in NAMES)
    assert (tmp_path / "out/dir").stat().st_mode & 0o777 == 0o700, "its owner can always remove it"


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/../out"])
def test_a_download_stays_below_its_directory(tmp_path: Path, name: str) -> None:
    writer = local.TreeWriter(str(tmp_path / "in"), None)
    with pytest.raises(ArchiveError):
        writer.write(tarball.file(name, b"x", 0o644))
    assert not (tmp_path / "out").exists()


def test_a_download_does_not_write_through_links_it_brought(tmp_path: Path) -> None:
    writer = local.TreeWriter(str(tmp_path / "in"), None)
    writer.write(tarball.header("evil", link=str(tmp_path)))
    with pytest.raises(ArchiveError):
        writer.write(tarball.file("evil/out", b"x", 0o644))
    assert not (tmp_path / "out").exists()
    os.symlink(tmp_path, tmp_path / "in/there")
    again = local.TreeWriter(str(tmp_path / "in"), None)
    with pytest.raises(ArchiveError):
        again.write(tarball.file("there/out", b"x", 0o644))


def test_an_archive_that_was_cut_short_is_an_error_and_leaves_no_half_file(tmp_path: Path) -> None:
    whole = tarball.file("one", b"x" * 600, 0o644) + tarball.file("two", b"y" * 600, 0o644)
    writer = local.TreeWriter(str(tmp_path / "out"), None)
    writer.write(whole[:-700])
    with pytest.raises(ArchiveError, match="short"):
        writer.finish()
    writer.discard()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["one"]


@pytest.mark.parametrize("junk", [b"not a tar archive" * 100, b"\xff" * 2048])
def test_what_is_not_an_archive_is_an_error(tmp_path: Path, junk: bytes) -> None:
    with pytest.raises(ArchiveError):
        local.TreeWriter(str(tmp_path / "out"), None).write(junk)


@given(st.binary(max_size=3000))
def test_no_archive_makes_the_reader_fail_in_another_way(data: bytes) -> None:
    feed = TarFeed()
    try:
        list(feed.feed(data))
        feed.finish()
    except ArchiveError:
        pass


def test_patterns_leave_names_and_paths_out() -> None:
    assert local.ignored("a/.git/config", [".git"])
    assert local.ignored("build/out", ["build/"])
    assert local.ignored("a/b.pyc", ["*.pyc"])
    assert local.ignored("docs/build/x", ["docs/build"])
    assert not local.ignored("other/build/x", ["docs/build"])


# --- requests ------------------------------------------------------------------------------------------


def test_configuration_is_spelled_as_the_wire_has_it() -> None:
    body = bodies.configuration(
        name="a",
        execution_time_limit=90,
        resources=Resources(0.5, 256, pids=100),
        snapshot_expiration=timedelta(days=1),
        snapshot_retention=SnapshotRetention(3, timedelta(hours=1)),
        ports=(80,),
    )
    assert body == {
        "name": "a",
        "timeout": 90_000,
        "resources": {"cpus": 0.5, "memoryMb": 256, "pids": 100, "exact": True},
        "snapshotExpiration": 86_400_000,
        "keepLastSnapshots": {"count": 3, "deleteEvicted": True, "expiration": 3_600_000},
        "ports": [80],
    }
    assert bodies.configuration(snapshot_retention=None) == {"keepLastSnapshots": None}
    assert bodies.configuration() == {}


@pytest.mark.parametrize(("given_as", "number"), [("TERM", 15), ("sigkill", 9), ("SIGINT", 2), (10, 10)])
def test_signals_have_names_and_numbers(given_as: str | int, number: int) -> None:
    assert bodies.signal_number(given_as) == number


@pytest.mark.parametrize("wrong", ["nothing", 0, 65])
def test_what_is_no_signal_is_refused(wrong: str | int) -> None:
    with pytest.raises(InvalidRequest):
        bodies.signal_number(wrong)


# --- input ---------------------------------------------------------------------------------------------


def test_input_is_given_whole_however_long_a_process_takes_to_read_it() -> None:
    taken = bytearray()
    calls = 0

    def send(data: bytes, offset: int | None, close: bool, seconds: float | None) -> int:
        nonlocal calls
        del seconds
        assert offset is not None and offset == len(taken)
        if close:
            return offset
        calls += 1
        if calls % 5 == 0:
            taken.extend(data[:3])
        if len(taken) - offset < len(data):
            raise StdinStalled("it reads nothing for now", bytes_written=len(taken))
        return len(taken)

    writer = StdinWriter(send, lambda: len(taken))
    writer._all(b"0123456789", None)
    assert taken == b"0123456789"
    with pytest.raises(RequestTimeout):
        StdinWriter(send, lambda: len(taken))._all(b"x", time.monotonic())
