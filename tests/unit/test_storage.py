"""`Storage` and the worker agree: each method of one is an operation of the other."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from sandkeep.host.images.allowance import Allowance
from sandkeep.host.images.image import Image
from sandkeep.host.images.transport import Access
from sandkeep.host.layers.sessions import SpecOutline
from sandkeep.host.layers.values import Layer, Recovered, Retired
from sandkeep.host.rootfs import Bind, Composed, ImageDefaults, Lower, Rootfs, Slot
from sandkeep.host.storage import Storage
from sandkeep.host.worker import DECODERS, OPERATIONS, _decoded, _plain
from sandkeep.reach import Reach

METHODS: dict[str, Callable[..., Any]] = {
    name: method
    for name, method in vars(Storage).items()
    if not name.startswith("_") and name != "close" and inspect.iscoroutinefunction(method)
}


def test_every_operation_of_the_worker_has_a_method_and_the_other_way_round() -> None:
    assert set(METHODS) == set(OPERATIONS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_and_its_operation_have_the_same_signature(name: str) -> None:
    assert inspect.signature(METHODS[name]) == inspect.signature(OPERATIONS[name])


@pytest.mark.parametrize("name", METHODS)
def test_a_method_sends_its_own_name_and_all_its_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[str, Any] = {}

    async def send(self: Storage, operation: str, **options: Any) -> None:
        sent.update(options, operation=operation)

    monkeypatch.setattr(Storage, "_send", send)
    monkeypatch.setattr(msgspec, "convert", lambda value, _: value)
    parameters = list(inspect.signature(METHODS[name]).parameters)[1:]
    given = {parameter: object() for parameter in parameters}
    asyncio.run(METHODS[name](Storage.__new__(Storage), **given))
    assert sent.pop("operation") == name
    assert sent.pop("missing_ok", False) == (name == "remove_image")
    if "progress" not in given:
        assert sent.pop("progress", None) is None
    assert sent == given


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_takes_survives_json(name: str) -> None:
    """Either as it is, or because the worker knows how to decode it."""
    hints = get_type_hints(OPERATIONS[name])
    hints.pop("return")
    hints.pop("progress", None)
    for parameter, hint in hints.items():
        structured = any(dataclasses.is_dataclass(leaf) for leaf in _leaves(hint))
        assert structured == (parameter in DECODERS), parameter


def _leaves(hint: Any) -> set[Any]:
    inner = get_args(hint)
    return {hint} if not inner else {leaf for part in inner for leaf in _leaves(part)}


def test_structured_arguments_arrive_as_they_were_sent() -> None:
    arguments: Mapping[str, Any] = {
        "access": Access(Reach(private=True, own_ports=(1, 2)), insecure=True, insecure_hosts=("a:1",)),
        "allowance": Allowance(images=3, seconds=0.5),
        "specs": [SpecOutline("sbx_1", 2, "host", None, ("lay_1",))],
    }
    assert set(arguments) == set(DECODERS)
    decoded = _decoded(json.loads(json.dumps(msgspec.to_builtins(arguments))))
    assert _listed(decoded) == _listed(arguments)


def _listed(arguments: Mapping[str, Any]) -> Any:
    """A sequence may come back as a list."""
    return json.dumps(msgspec.to_builtins(arguments), sort_keys=True)


def test_results_arrive_as_they_were_returned() -> None:
    rootfs = Rootfs(
        "host@1",
        "user",
        (Slot("root", "/", (Lower("/a"), Lower("/b", store=False)), room_bytes=5),),
        (Bind("/usr", "/usr"),),
        ImageDefaults(env={"A": "b"}, home="/root"),
        "key",
    )
    image = Image(
        id="sha256:1",
        kind="oci",
        flavour="user",
        slots=rootfs.slots,
        defaults=rootfs.defaults,
        created_ms=1,
        size=2,
        names=("a",),
        owners={"prj": ("b",)},
        config={"Cmd": ["sh"]},
    )
    layer = Layer(
        "lay_1", None, "host", "user", None, 1, None, 2, 1, ("root",), "fs", (Retired("x", None, 3),)
    )
    results: Sequence[tuple[Any, Any]] = (
        (Composed(rootfs, ("a warning",)), Composed),
        (image, Image),
        ([image], list[Image]),
        (layer, Layer),
        (Recovered((layer,), ("s",), ()), Recovered),
        ({"lay_1": ("a", "b")}, dict[str, tuple[str, ...]]),
    )
    for value, kind in results:
        assert msgspec.convert(json.loads(json.dumps(_plain(value))), kind) == value
