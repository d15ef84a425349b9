"""Errors: what they say, and as what they can be caught."""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import traceback
from typing import Any

import pytest

import sandkeep
from sandkeep.errors import (
    ExecutableNotFound,
    IsDirectory,
    NoSpace,
    NotDirectory,
    PathError,
    PathExists,
    PathNotFound,
    PathPermission,
)
from tests.running_user import ONE_ID

pytestmark = pytest.mark.anyio


async def test_what_to_do_about_it_is_in_the_text_once() -> None:
    async with sandkeep.create_sandbox() as box:
        with pytest.raises(ExecutableNotFound) as failed:
            await box.run_process("echo hello")
        assert failed.value.hint and failed.value.hint not in failed.value.message
        assert str(failed.value) == f"{failed.value.message} (hint: {failed.value.hint})"
        assert "".join(traceback.format_exception(failed.value)).count(failed.value.hint) == 1


async def test_failures_of_files_are_those_of_open_too(name: str) -> None:
    async with sandkeep.create_sandbox(name) as box:
        await box.fs.write_text("there/file", "x")
        failures: list[tuple[type[OSError], Any, tuple[str, ...]]] = [
            (FileNotFoundError, box.fs.read_bytes, ("nothing",)),
            (FileExistsError, box.fs.mkdir, ("there",)),
            (NotADirectoryError, box.fs.listdir, ("there/file",)),
            (IsADirectoryError, box.fs.read_bytes, ("there",)),
            (PermissionError, box.fs.listdir, ("/root",)),
        ]
        for kind, operation, arguments in failures:
            if kind is PermissionError and ONE_ID:
                continue  # where there is one id, everything is its own
            with pytest.raises(kind) as failed:
                await operation(*arguments)
            assert isinstance(failed.value, PathError) and failed.value.errno
            assert failed.value.filename == failed.value.path and failed.value.strerror
            copy = pickle.loads(pickle.dumps(failed.value))
            assert type(copy) is type(failed.value) and str(copy) == str(failed.value)
            assert (copy.filename, copy.details) == (failed.value.filename, failed.value.details)


def test_a_failure_of_a_file_has_an_errno_wherever_it_was_raised() -> None:
    kinds = [
        (PathNotFound, FileNotFoundError, errno.ENOENT),
        (PathExists, FileExistsError, errno.EEXIST),
        (NotDirectory, NotADirectoryError, errno.ENOTDIR),
        (IsDirectory, IsADirectoryError, errno.EISDIR),
        (PathPermission, PermissionError, errno.EACCES),
    ]
    for kind, built_in, number in kinds:
        error = kind("write x: no", path="x", operation="write")
        assert isinstance(error, built_in) and isinstance(error, OSError)
        assert (error.errno, error.filename, error.strerror) == (number, "x", os.strerror(number))
        assert pickle.loads(pickle.dumps(error)).errno == number
        assert kind("x", errno=errno.EROFS).errno == errno.EROFS
    assert not issubclass(NoSpace, OSError) and issubclass(NoSpace, PathError)


async def test_values_can_be_copied_and_kept_and_handles_say_why_not(name: str) -> None:
    async with sandkeep.create_sandbox(name, tags={"a": "b"}, env={"X": "y"}) as box:
        process = await box.create_process("true")
        info = await process.refresh()
        (listed,) = [each async for each in sandkeep.query_sandboxes() if each.name == name]
        for value in (box.current_session, listed, info, await box.checkpoint(), await box.fs.stat("/")):
            assert pickle.loads(pickle.dumps(value)) == value
            assert dataclasses.asdict(value).keys() == {each.name for each in dataclasses.fields(value)}
        assert dataclasses.asdict(listed)["tags"] == {"a": "b"}
        with pytest.raises(TypeError, match="is immutable"):
            listed.tags["c"] = "d"  # type: ignore[index]
        with pytest.raises(TypeError, match=r"reference\(\) for bind\(\), or its name for get_sandbox"):
            pickle.dumps(box)
        with pytest.raises(TypeError, match=r"reference\(\) for bind\(\), or its id for get_process"):
            pickle.dumps(process)
