"""Structured log lines: one event per line, as JSON for programs or text for people."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, TextIO

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def make_log(style: str = "text", *, level: str = "info", out: TextIO | None = None) -> Callable[..., None]:
    """Return a function ``log(message, level="info", **facts)``. If it logs an error, an exception among the
    facts brings its traceback."""
    least = LEVELS[level]
    stream = sys.stderr if out is None else out

    def log(message: str, *, level: str = "info", **facts: Any) -> None:
        if LEVELS[level] < least:
            return
        trace = ""
        for name, value in facts.items():
            if isinstance(value, BaseException):
                facts[name] = f"{type(value).__name__}: {value}"
                if level == "error":
                    trace = "".join(traceback.format_exception(value))
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        if style == "json":
            if trace:
                facts["traceback"] = trace
            line = json.dumps({"time": stamp, "level": level, "message": message, **facts}, default=str)
        else:
            shown = " ".join(f"{name}={_plain(value)}" for name, value in facts.items())
            line = f"{stamp} {level:<7} {message} {shown}".rstrip() + ("\n" + trace.rstrip() if trace else "")
        try:
            stream.write(line + "\n")
            stream.flush()
        except OSError:
            pass  # a full disk or a closed terminal must not stop the server

    return log


def _plain(value: Any) -> str:
    """Quote a value that is ambiguous: a client must not be able to forge lines of our log."""
    text = str(value)
    safe = text.isprintable() and text and not any(char in text for char in ' "=')
    return text if safe else json.dumps(text)


class LogForwarder(logging.Handler):
    """Forwards log records of libraries to our log."""

    def __init__(self, log: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level = "error" if record.levelno >= logging.ERROR else "warning"
        facts: dict[str, Any] = {"logger": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            facts["error"] = record.exc_info[1]
        self._log(record.getMessage().strip(), level=level, **facts)
