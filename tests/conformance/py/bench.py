"""What the scenarios of the Python client work with, whichever of its two surfaces they run on.

Scenarios are written once, against the asynchronous surface. For the blocking one its handles are wrapped so
that awaiting a call makes it.
"""

from __future__ import annotations

import asyncio
import enum
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

from vercel import sandbox as api  # type: ignore[import-not-found]

PLAIN = (str, bytes, int, float, bool, type(None), enum.Enum, timedelta)
SCENARIOS: dict[str, Callable[[Any], Awaitable[Any]]] = {}


class Call:
    """A call of the blocking client that has not been made yet: await it, enter it, or iterate over it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.entered: Any = None

    def __await__(self) -> Any:
        yield from ()
        return wrap(self.make())

    async def __aenter__(self) -> Any:
        self.entered = self.make()
        return wrap(self.entered.__enter__())

    async def __aexit__(self, *error: Any) -> Any:
        return self.entered.__exit__(*error)

    async def __aiter__(self) -> Any:
        for item in self.make():
            yield wrap(item)


class Blocking:
    """A handle of the blocking client."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.target, name)
        if not callable(value):
            return wrap(value)
        return lambda *args, **kwargs: Call(
            lambda: value(
                *(unwrap(arg) for arg in args), **{key: unwrap(item) for key, item in kwargs.items()}
            )
        )


def wrap(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return [wrap(item) for item in value]
    if isinstance(value, dict):
        return {key: wrap(item) for key, item in value.items()}
    return Blocking(value)


def unwrap(value: Any) -> Any:
    if isinstance(value, Blocking):
        return value.target
    if isinstance(value, dict):
        return {key: unwrap(item) for key, item in value.items()}
    return value


class Bench:
    """What a scenario works with: a client, and names nobody else uses."""

    def __init__(self, client: Any, *, blocking: bool) -> None:
        self.client = client
        self.blocking = blocking
        self.prefix = f"py-{uuid.uuid4().hex[:10]}"

    def name(self, suffix: str = "box") -> str:
        return f"{self.prefix}-{suffix}"

    def box(self, suffix: str = "box", **options: Any) -> Any:
        """A sandbox that is destroyed at the end of the block."""
        return self.client.create_sandbox(name=self.name(suffix), **options)

    def at_once(self, value: Any) -> Any:
        """The result of a call that is not asynchronous on either surface."""
        return wrap(value.make()) if isinstance(value, Call) else value

    async def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        if not self.blocking:
            return list(await asyncio.gather(*(call() for call in calls)))
        results: list[Any] = [None] * len(calls)

        def work(index: int) -> None:
            results[index] = wrap(calls[index]().make())

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def scenario(function: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    SCENARIOS[function.__name__] = function
    return function


async def refusal(call: Any) -> list[Any]:
    """Status and code of a request that must fail."""
    try:
        await call
    except api.SandboxApiError as error:
        return [error.status_code, error.code]
    raise AssertionError("the request succeeded")


async def sh(box: Any, script: str, **options: Any) -> str:
    done = await box.run_process("sh", ["-c", script], capture_output=True, **options)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return str(done.stdout)


def ms(value: timedelta | None) -> int | None:
    return None if value is None else value // timedelta(milliseconds=1)


async def collect(items: Any) -> list[Any]:
    return [item async for item in items]


async def rows(box: Any) -> tuple[list[Any], list[Any]]:
    return await box.list_sessions(), await box.list_snapshots()


def connect(url: str, *, blocking: bool, environment: bool = False) -> Any:
    """A client of the server at a URL; ``environment``: it looks for its credentials itself."""
    credentials = api.SandboxCredentials(
        token=os.environ["VERCEL_OIDC_TOKEN"],
        team_id=os.environ["SANDBOX_TEAM"],
        project_id=os.environ["SANDBOX_PROJECT"],
    )

    async def factory() -> Any:
        return credentials

    if blocking:
        options = api.sync.SandboxServiceOptions(
            base_url=f"{url}/api", **({} if environment else {"credentials_factory": lambda: credentials})
        )
        return Blocking(api.sync.SyncSandboxClient.create(options=options))
    options = api.SandboxServiceOptions(
        base_url=f"{url}/api", **({} if environment else {"credentials_factory": factory})
    )
    return api.SandboxClient.create(options=options)
