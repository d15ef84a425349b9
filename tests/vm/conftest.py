"""Everything in this folder is slow. What starts machines needs a lab that can be built here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.vm import lab
from tests.vm.debian import NotFetched
from tests.vm.machine import Machine

HERE = Path(__file__).parent

Machines = Callable[..., AbstractContextManager[Machine]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if "machines" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.vm)


@pytest.fixture(scope="session")
def machines() -> Machines:
    """Fresh machines, by the name of a kernel; see `lab.machine`."""
    reason = lab.why_not()
    if reason:
        pytest.skip(f"no machines can be started here: {reason}")
    return machine_or_skip


@contextmanager
def machine_or_skip(kernel: str, **how: Any) -> Iterator[Machine]:
    try:
        lab.image(kernel)
    except NotFetched as error:
        pytest.skip(f"the lab cannot be built here: {error}")
    with lab.machine(kernel, **how) as made:
        yield made


@pytest.fixture(scope="class")
def machine(request: pytest.FixtureRequest, machines: Machines) -> Iterator[Machine]:
    """The machine of a class that names its kernel, one for all its tests."""
    # A session may use 2 GiB before it is ended for it, and the machine needs some too.
    with machines(request.cls.kernel, memory=3072) as made:
        yield made
