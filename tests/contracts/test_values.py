"""Which values have an agreed JSON form, and what that form is (H07)."""

import dataclasses
import enum
import json
import math
import subprocess
import sys
from collections import OrderedDict, namedtuple
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pydantic
import pytest

from perdure.contracts.values import to_json
from perdure.errors import ValueFormError


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Word(enum.StrEnum):
    YES = "yes"


class Held(enum.Enum):
    PAIR = (1, "a")


@dataclasses.dataclass
class Box:
    color: Color
    inside: Any = None


@dataclasses.dataclass
class Half:
    there: int
    missing: int = dataclasses.field(init=False)


class Point(msgspec.Struct, rename="camel", tag="point"):
    x_axis: int
    note: str | msgspec.UnsetType | None = msgspec.UNSET


class Base(pydantic.BaseModel):
    a: int = 1


class Derived(Base):
    b: int = 2


class Holder(pydantic.BaseModel):
    base: Base = pydantic.Field(default_factory=Base, alias="theBase")
    anything: Any = None


class Raising(pydantic.BaseModel):
    a: int = 1

    @pydantic.field_serializer("a")
    def refuse(self, value: int) -> int:
        raise LookupError("no form")


class RaisingProperty(msgspec.Struct):
    a: int = 1

    def __getattribute__(self, name: str) -> Any:
        if name == "a":
            raise LookupError("no form")
        return super().__getattribute__(name)


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


class Distinct(str):
    """A key that is equal to itself alone."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class Odd(int):
    def __index__(self) -> int:
        return 99

    def __int__(self) -> int:
        return 99


class Real(float):
    def __float__(self) -> float:
        return 99.0


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unwilling(dict[str, int]):
    def items(self) -> Any:
        raise Mute


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - the untyped form is what is tested
EAST = timezone(timedelta(hours=5, minutes=30))
OLD = timezone(timedelta(hours=0, minutes=19, seconds=32))

FORMS: dict[str, tuple[Any, Any]] = {
    "null": (None, None),
    "true": (True, True),
    "zero": (0, 0),
    "an integer above 2**53": (2**53 + 1, 2**53 + 1),
    "the largest integer": (2**63 - 1, 2**63 - 1),
    "the smallest integer": (-(2**63), -(2**63)),
    "a float": (1.5, 1.5),
    "negative zero": (-0.0, -0.0),
    "text": ("é \x00 𝄞", "é \x00 𝄞"),
    "a tuple": ((1, (2,)), [1, [2]]),
    "a named tuple": (Pair(1, 2), [1, 2]),
    "an ordered dict": (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "an enum": (Color.RED, "red"),
    "an integer enum": (Level.HIGH, 3),
    "a text enum": (Word.YES, "yes"),
    "an enum that holds a pair": (Held.PAIR, [1, "a"]),
    "an enum in a dataclass in a list": ([Box(Color.RED)], [{"color": "red", "inside": None}]),
    "a text enum as key": ({Word.YES: 1}, {"yes": 1}),
    "a Decimal": (Decimal("1.10"), "1.10"),
    "a large Decimal": (Decimal("1E+30"), "1E+30"),
    "an aware datetime": (datetime(2025, 1, 31, 12, 0, 0, 5, tzinfo=UTC), "2025-01-31T12:00:00.000005+00:00"),
    "an aware datetime elsewhere": (datetime(2025, 1, 31, 12, tzinfo=EAST), "2025-01-31T12:00:00+05:30"),
    "an offset with seconds": (datetime(1900, 1, 1, 12, tzinfo=OLD), "1900-01-01T11:40:28+00:00"),
    "a msgspec record": (Point(1, "n"), {"type": "point", "xAxis": 1, "note": "n"}),
    "a msgspec field that is unset": (Point(1), {"type": "point", "xAxis": 1}),
    "a msgspec field that is null": (Point(1, None), {"type": "point", "xAxis": 1, "note": None}),
    "a pydantic record": (Holder(), {"theBase": {"a": 1}, "anything": None}),
    "a pydantic subclass where its base is declared": (
        Holder(theBase=Derived()),
        {"theBase": {"a": 1, "b": 2}, "anything": None},
    ),
    "a msgspec record in a pydantic one": (
        Holder(anything=[Point(1)]),
        {"theBase": {"a": 1}, "anything": [{"type": "point", "xAxis": 1}]},
    ),
    "a pydantic root model": (pydantic.RootModel[list[Color]]([Color.RED]), ["red"]),
    "a subclass of str with its own text": (Loud("mine"), "mine"),
    "a subclass of int with its own number": (Odd(3), 3),
    "a subclass of float with its own number": (Real(1.5), 1.5),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_value_with_an_agreed_form_becomes_exactly_that(name: str) -> None:
    """H07."""
    value, form = FORMS[name]
    converted = to_json(value)
    assert converted == form
    assert json.loads(json.dumps(converted, allow_nan=False)) == form
    assert msgspec.json.decode(msgspec.json.encode(converted)) == form


def test_subclasses_of_plain_types_come_out_as_the_plain_types() -> None:
    """H07."""
    assert [type(to_json(value)) for value in (Loud("a"), Odd(1), Real(1.0), Level.HIGH)] == [str, int, float, int]


def _loop() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _loop_of_records() -> Box:
    box = Box(Color.RED)
    box.inside = [box]
    return box


def _loop_of_models() -> Holder:
    holder = Holder()
    holder.anything = holder
    return holder


FORMLESS: dict[str, tuple[Any, str]] = {
    "a set": ({1}, "$"),
    "a frozenset in a list": ([1, frozenset()], "$[1]"),
    "bytes": (b"a", "$"),
    "NaN": (math.nan, "$"),
    "infinity": ({"a": [-math.inf]}, "$.a[0]"),
    "an integer beyond 64 bits": (2**63, "$"),
    "an integer below 64 bits": (-(2**63) - 1, "$"),
    "a subclass of int beyond 64 bits": (Odd(2**64), "$"),
    "integer keys": ({"a": {1: 2}}, "$.a"),
    "an enum key that is no text": ({Color.RED: 1}, "$"),
    "two keys with one text": ({"no": 1, Distinct("no"): 2}, "$"),
    "a lone surrogate": ("\ud800", "$"),
    "a lone surrogate in a key": ({"\ud800": 1}, "$"),
    "a naive datetime": (datetime(2025, 1, 31), "$"),  # noqa: DTZ001 - that is what is tested
    "a date": (date(2025, 1, 31), "$"),
    "a duration": (timedelta(1), "$"),
    "Decimal NaN": (Decimal("NaN"), "$"),
    "Decimal signalling NaN": (Decimal("sNaN"), "$"),
    "Decimal infinity": (Decimal("-Infinity"), "$"),
    "an object": (object(), "$"),
    "a class": (Box, "$"),
    "a function": (len, "$"),
    "an unset value": (msgspec.UNSET, "$"),
    "bytes in a pydantic record": (Holder(anything=b"a"), "$.anything"),
    "a set in a pydantic record": (Holder(anything={1}), "$.anything"),
    "NaN in a pydantic record": (Holder(anything=[math.nan]), "$.anything[0]"),
    "a set in a msgspec record": (msgspec.defstruct("Bag", [("items", set[int])])({1}), "$.items"),
    "a set in a dataclass in a list": ([Box(Color.RED, {1})], "$[0].inside"),
    "a dataclass field without a value": ({"h": Half(1)}, "$.h"),
    "a serializer that raises": ([Raising()], "$[0]"),
    "a property that raises": ([RaisingProperty()], "$[0]"),
    "a container that raises": (Unwilling(), "$"),
}


@pytest.mark.parametrize("name", FORMLESS)
def test_a_value_without_an_agreed_form_is_refused_with_its_place(name: str) -> None:
    """H07."""
    value, path = FORMLESS[name]
    with pytest.raises(ValueFormError) as raised:
        to_json(value)
    assert raised.value.path == path


@pytest.mark.parametrize("value", [_loop(), _loop_of_records(), _loop_of_models()], ids=["list", "record", "model"])
def test_a_value_that_holds_itself_is_refused(value: Any) -> None:
    """H07."""
    with pytest.raises(ValueFormError) as raised:
        to_json(value)
    assert len(raised.value.path) <= 200


def test_the_deepest_allowed_nesting_is_converted_and_one_more_is_refused() -> None:
    """H07."""
    value: Any = 1
    for _ in range(200):
        value = [value]
    assert to_json(value) == value
    with pytest.raises(ValueFormError):
        to_json([value])


def test_converting_imports_no_pydantic() -> None:
    """H07."""
    program = (
        "import dataclasses, sys\n"
        "from perdure.contracts.values import to_json\n"
        "@dataclasses.dataclass\n"
        "class A:\n    a: int\n"
        "assert to_json([A(1), {'b': 1.5}]) == [{'a': 1}, {'b': 1.5}]\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
