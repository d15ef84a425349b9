"""Names people read and ids machines sort. Time and randomness are arguments."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable
from typing import Literal

from sandkeep.errors import InvalidRequest

LONGEST_NAME = 128
RESERVED = frozenset({"sessions", "snapshots", "drives"})
"""Words that the API's paths use in place of a name."""

IdKind = Literal["sbx", "cmd", "snap", "drv", "tok", "evt", "box", "prj", "fill"]
"""Session, process, snapshot, drive, token, event; never shown: sandbox, project, a process of the engine."""

Pick = Callable[[int], int]
"""Returns a random number below its argument."""

# A leading dash would be parsed as an option on every command line the name is pasted into.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*", re.ASCII)

# In the order of their bytes, so that ids sort as their times do.
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_TIME_DIGITS = 8
_RANDOM_DIGITS = 14
# Without vowels and look-alikes: suffixes do not spell words and are not misread.
_SUFFIX = "23456789bcdfghjkmnpqrstvwxz"
_SUFFIX_LENGTH = 4


def check_name(name: str, *, kind: str = "sandbox") -> str:
    """Return the name itself, or raise `InvalidRequest` saying what is wrong with it."""
    if not 1 <= len(name) <= LONGEST_NAME:
        raise InvalidRequest(f"a {kind} name has 1 to {LONGEST_NAME} characters", field="name")
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"a {kind} name has letters, digits, - and _ only, and does not start with -", field="name"
        )
    if name in RESERVED:
        raise InvalidRequest(f"{name} is a reserved word", field="name")
    return name


def new_name(*, pick: Pick = secrets.randbelow) -> str:
    """Return a readable name such as ``quiet-otter-7kxm``; about nine billion are possible."""
    suffix = "".join(_SUFFIX[pick(len(_SUFFIX))] for _ in range(_SUFFIX_LENGTH))
    return f"{ADJECTIVES[pick(len(ADJECTIVES))]}-{NOUNS[pick(len(NOUNS))]}-{suffix}"


def new_id(kind: IdKind, *, now_ms: int, pick: Pick = secrets.randbelow) -> str:
    """Return an id that sorts by time, to the millisecond, and has 83 random bits that cannot be guessed."""
    random = pick(len(_DIGITS) ** _RANDOM_DIGITS)
    return f"{kind}_{_digits(now_ms, _TIME_DIGITS)}{_digits(random, _RANDOM_DIGITS)}"


def keyed_id(kind: IdKind, *key: str) -> str:
    """Return the id for a request key: the same each time, and different for every other key."""
    return f"{kind}_{_digits(_number(*key), _TIME_DIGITS + _RANDOM_DIGITS)}"


def keyed_name(*key: str) -> str:
    """Return the name for a request key, likewise."""
    number = _number("name", *key)

    def pick(below: int) -> int:
        nonlocal number
        number, chosen = divmod(number, below)
        return chosen

    return new_name(pick=pick)


def _number(*key: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(key).encode()).digest(), "big")


def snapshot_id_of(session: str) -> str:
    """Return the id of the snapshot that the end of a session makes."""
    return f"snap_{session[4:]}"


def _digits(number: int, width: int) -> str:
    text = ""
    for _ in range(width):
        number, digit = divmod(number, len(_DIGITS))
        text = _DIGITS[digit] + text
    return text


_ADJECTIVES = """
    able agile airy alert amber ample apt arctic ashen azure balmy bold brave breezy bright brisk bronze
    calm candid chilly civil clear clever coastal cobalt coral cosmic cosy crisp curious dapper daring deft
    distant dusky eager early earnest easy fabled fair fleet fluent fond frosty gentle gilded glad golden
    grand green handy happy hardy hazel honest humble hushed indigo ivory jade jolly keen kind lively lofty
    loyal lucid lucky lunar maple mellow merry mild misty modest mossy nimble noble olive open patient pearl
    placid plucky polar proud quick quiet rapid ready robust rosy royal rustic sandy serene sharp silent
    silver simple sleek smooth snowy snug solar solid spry steady still stout sunny swift tidy tranquil
    trusty velvet verdant vivid warm wise witty zesty
"""

_NOUNS = """
    acorn alder anchor arbor aspen aurora badger basin bay beacon beaver birch bison bluff bough brook canyon
    cedar cliff cloud clover comet condor coral cove crane creek cricket cypress dale delta dolphin dove dune
    eagle echo egret elk elm ember falcon fern finch fjord forest fox garden geyser glacier glade grove gull
    harbor hare haven hawk hazel heron hill ibex inlet iris island juniper kestrel kite koala lagoon lake lark
    laurel ledge lemur lichen lily linden lotus lynx maple marmot marsh marten meadow mesa meteor mill moose
    moss nebula nest newt oak oasis orchard orchid osprey otter owl panda pebble pelican pine planet plover
    pond poplar prairie puffin quail quarry quartz rabbit raven reed reef ridge river robin salmon sequoia
    shore sparrow spring spruce stone stork summit swan tern thicket thistle tide trail tulip tundra valley
    walnut willow wren yew
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
