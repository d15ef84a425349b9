"""Frozen values made by ``sandkeep.dataclass`` behave like those made by ``dataclasses``."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field
from typing import Any, ClassVar

import pytest

import sandkeep
from sandkeep.dataclass import dataclass
from sandkeep.frozen import Frozen


@dataclass(frozen=True, slots=True)
class Pair:
    kind: ClassVar[str] = "pair"
    left: int
    right: str = "r"
    hidden: list[int] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.left < 0:
            raise ValueError("left")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Pair):
    """A pair with a name."""

    name: str = "n"

    def __post_init__(self) -> None:
        Pair.__post_init__(self)
        if not self.name:
            raise ValueError("name")


@dataclasses.dataclass(frozen=True, slots=True)
class Twin:
    kind: ClassVar[str] = "pair"
    left: int
    right: str = "r"
    hidden: list[int] = field(default_factory=list, repr=False, compare=False)


@dataclass(frozen=True, slots=True, init=False)
class Own:
    """Has an ``__init__`` and a ``__repr__`` of its own."""

    value: int

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "value", int(text))

    def __repr__(self) -> str:
        return "own"


def test_signatures_fields_and_text_are_those_of_dataclasses() -> None:
    assert str(inspect.signature(Pair)) == str(inspect.signature(Twin))
    assert str(inspect.signature(Pair.__init__)) == str(inspect.signature(Twin.__init__))
    assert [each.name for each in dataclasses.fields(Pair)] == ["left", "right", "hidden"]
    assert repr(Pair(1)) == repr(Twin(1)).replace("Twin", "Pair")
    assert str(inspect.signature(Named)).endswith("*, name: 'str' = 'n') -> None")
    assert repr(Named(1, name="x")) == "Named(left=1, right='r', name='x')"
    assert repr(Own("3")) == "own" and Own("3") == Own("3") and Own("3").value == 3


def test_arguments_are_checked_and_factories_called_for_each_value() -> None:
    assert Pair(1).hidden == [] and Pair(1).hidden is not Pair(1).hidden
    anything: Any = Pair
    for wrong in ({}, {"left": 1, "more": 2}):
        with pytest.raises(TypeError):
            anything(**wrong)
    anything = Named
    with pytest.raises(TypeError):
        anything(1, "r", [], "x")
    with pytest.raises(ValueError, match="left"):
        Named(-1)
    with pytest.raises(ValueError, match="name"):
        dataclasses.replace(Named(1), name="")


def test_equality_and_hash_use_the_fields_that_are_compared() -> None:
    assert Pair(1) == Pair(1, hidden=[2]) != Pair(2) and hash(Pair(1)) == hash(Pair(1, hidden=[2]))
    others: list[object] = [Named(1), (1, "r")]
    assert all(Pair(1) != other for other in others)
    assert {Pair(1), Pair(1), Pair(2)} == {Pair(2), Pair(1)}


@pytest.mark.parametrize("value", [Pair(1, "x", [3]), Named(2, name="y")])
def test_values_are_copied_pickled_and_matched(value: Any) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(value, protocol)).hidden == value.hidden
    assert copy.copy(value) == copy.deepcopy(value) == value
    assert type(value)(**dataclasses.asdict(value)) == value
    match value:
        case Pair(left, right):
            assert (left, right) == (value.left, value.right)


def test_nothing_can_be_assigned_or_deleted() -> None:
    value: Any = Named(1)
    for name in ("left", "name"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 2)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(value, name)
    with pytest.raises(AttributeError):
        value.other = 1
    assert not hasattr(value, "__dict__")


def test_every_public_value_is_one() -> None:
    found = [
        kind
        for name in sandkeep.__all__
        if isinstance(kind := getattr(sandkeep, name), type) and dataclasses.is_dataclass(kind)
    ]
    assert len(found) > 40
    assert {vars(kind)["__setattr__"].__module__ for kind in found} == {"sandkeep.dataclass"}


def test_every_public_value_can_be_pickled_and_made_a_dictionary() -> None:
    """Filled by force: what a value may hold is tested elsewhere."""
    for name in sandkeep.__all__:
        kind: Any = getattr(sandkeep, name)
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            continue
        value: Any = kind.__new__(kind)
        fields = dataclasses.fields(kind)
        for each in fields:
            mapping = "Mapping" in str(each.type)
            object.__setattr__(value, each.name, Frozen({"key": "value"}) if mapping else each.name)
        again = pickle.loads(pickle.dumps(value))
        assert [getattr(again, each.name) for each in fields] == [
            getattr(value, each.name) for each in fields
        ]
        shown = dataclasses.asdict(value)
        assert shown.keys() == {each.name for each in fields}, name
        assert copy.deepcopy(value) == value == copy.copy(value)
