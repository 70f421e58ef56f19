"""What a model sent, checked: arguments that fit become Python values, others become a diagnostic of ours."""

import dataclasses
import enum
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from itertools import combinations
from typing import Annotated, Any, Literal

import pydantic
import pytest

from perdure.calls import CallContext
from perdure.ports import InvalidArgumentsError
from perdure.tools.define import tool

CONTEXT = CallContext("run", "call", 1, 1, None, None)


class Kind(enum.Enum):
    GOOD = "good"
    BAD = "bad"


class Item(pydantic.BaseModel):
    title: str
    count: Annotated[int, pydantic.Field(ge=1, le=5)]


class Cat(pydantic.BaseModel):
    species: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    species: Literal["dog"]
    tricks: list[str]


class Checked(pydantic.BaseModel):
    low: int
    high: int

    @pydantic.model_validator(mode="after")
    def ordered(self) -> "Checked":
        if self.low > self.high:
            raise ValueError("low is above high")
        return self

    @pydantic.field_validator("low")
    @classmethod
    def no_thirteen(cls, value: int) -> int:
        if value == 13:
            raise LookupError("thirteen")
        return value


@dataclasses.dataclass
class When:
    at: datetime


@tool(effect="read")
async def everything(
    text: str,
    number: float = 1.0,
    whole: int = 0,
    kind: Kind = Kind.GOOD,
    items: list[Item] = [],  # noqa: B006 - what is tested is that calls do not share it
    when: When | None = None,
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="species")] | None = None,
    amount: Decimal | None = None,
    tags: set[str] = set(),  # noqa: B006 - as above
    checked: Checked | None = None,
    call: CallContext = CONTEXT,
) -> dict[str, Any]:
    """Takes all of it."""
    items.append(Item(title="added", count=1))
    return {k: v for k, v in locals().items() if k != "call"}


def diagnostic(arguments: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidArgumentsError) as raised:
        everything.bind(arguments)
    lines = raised.value.diagnostic.splitlines()
    assert lines[0] == "The arguments do not fit the tool everything:"
    assert lines[-1] == 'Example that fits: {"text": "text"}'
    return lines[1:-1]


async def test_arguments_that_fit_arrive_as_the_types_of_the_function() -> None:
    """R-008."""
    arguments = {
        "text": "a",
        "number": 2,
        "kind": "bad",
        "items": [{"title": "t", "count": 5}],
        "when": {"at": "2025-01-31T12:00:00Z"},
        "pet": {"species": "dog", "tricks": ["sit"]},
        "amount": "1.10",
        "tags": ["x"],
        "checked": {"low": 1, "high": 2},
    }
    got = await everything.bind(arguments)(CONTEXT)
    assert got == {
        "text": "a",
        "number": 2.0,
        "whole": 0,
        "kind": Kind.BAD,
        "items": [Item(title="t", count=5), Item(title="added", count=1)],
        "when": When(datetime(2025, 1, 31, 12, tzinfo=UTC)),
        "pet": Dog(species="dog", tricks=["sit"]),
        "amount": Decimal("1.10"),
        "tags": {"x"},
        "checked": Checked(low=1, high=2),
    }


async def test_each_attempt_gets_arguments_no_earlier_attempt_has_touched() -> None:
    """S-067."""
    run = everything.bind({"text": "a", "items": [{"title": "t", "count": 5}]})
    first, second = await run(CONTEXT), await run(CONTEXT)
    assert first == second
    assert isinstance(first, dict)
    assert len(first["items"]) == 2


async def test_a_parameter_that_was_not_sent_keeps_the_very_default_of_the_function() -> None:
    """R-008."""
    nothing = object()

    @tool
    async def act(limit: int | None = nothing, other: int = pydantic.Field(default=4)) -> Any:  # type: ignore[assignment]
        return limit, other

    got = await act.bind({})(CONTEXT)
    assert got == (nothing, 4)


async def test_an_empty_object_fits_a_tool_without_required_parameters() -> None:
    """H13."""

    @tool
    async def act(call: CallContext) -> str:
        return call.run_id

    assert await act.bind({})(CONTEXT) == "run"


UNKNOWN_FIELD = (
    "- zzzzz: expected no such field (known fields: text, number, whole, kind, items, when, pet, amount, tags, "
    "checked); received array [1]"
)
NO_KIND = (
    '- pet: expected object {species "cat", lives} or object {species "dog", tricks}; '
    'received object {"species": "fish"}'
)
OWN_RULE = '- checked: expected object {low, high} or null; received object {"low": 3, "high": 2} (low is above high)'

PROBLEMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing where a field is required": ({}, ["- text: expected string; received nothing (the field is required)"]),
    "a number where text is expected": ({"text": 5}, ["- text: expected string; received integer 5"]),
    "text where a number is expected": (
        {"text": "a", "whole": "5"},
        ['- whole: expected integer; received string "5"'],
    ),
    "a truth where a number is expected": (
        {"text": "a", "whole": True},
        ["- whole: expected integer; received boolean true"],
    ),
    "a fraction where a whole number is expected": (
        {"text": "a", "whole": 1.5},
        ["- whole: expected integer; received number 1.5"],
    ),
    "a whole number written as a fraction": (
        {"text": "a", "whole": 1.0},
        ["- whole: expected integer; received number 1.0"],
    ),
    "null": ({"text": None}, ["- text: expected string; received null"]),
    "a word of no choice": (
        {"text": "a", "kind": "fine"},
        ['- kind: expected one of "good", "bad"; received string "fine"'],
    ),
    "an object packed in a string": (
        {"text": "a", "checked": '{"low": 1}'},
        ['- checked: expected object {low, high} or null; received string "{\\"low\\": 1}"'],
    ),
    "a field inside a list": (
        {"text": "a", "items": [{"title": "t", "count": 1}, {"title": "t", "count": 9}]},
        ["- items[1].count: expected integer, minimum 1, maximum 5; received integer 9"],
    ),
    "a field with a slip": (
        {"text": "a", "kinds": "good"},
        ['- kinds: expected no such field (did you mean kind?); received string "good"'],
    ),
    "an unknown field": (
        {"text": "a", "zzzzz": [1]},
        [UNKNOWN_FIELD],
    ),
    "text that is no time": (
        {"text": "a", "when": {"at": "soon"}},
        ['- when.at: expected string (date-time); received string "soon"'],
    ),
    "one kind of a union": (
        {"text": "a", "pet": {"species": "cat", "lives": "nine"}},
        ['- pet.lives: expected integer; received string "nine"'],
    ),
    "no kind of a union": (
        {"text": "a", "pet": {"species": "fish"}},
        [
            NO_KIND,
        ],
    ),
    "a rule of the user's own": (
        {"text": "a", "checked": {"low": 3, "high": 2}},
        [
            OWN_RULE,
        ],
    ),
    "a validator that breaks": (
        {"text": "a", "checked": {"low": 13, "high": 20}},
        ["- (the whole value): checking it raised LookupError: thirteen"],
    ),
    "several at once": (
        {"number": "x", "whole": [], "kind": 1},
        [
            "- text: expected string; received nothing (the field is required)",
            '- kind: expected one of "good", "bad"; received integer 1',
            '- number: expected number; received string "x"',
            "- whole: expected integer; received array []",
        ],
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_arguments_that_do_not_fit_are_told_by_field_expected_received_and_an_example(case: str) -> None:
    """R-008, H13."""
    arguments, lines = PROBLEMS[case]
    assert diagnostic(arguments) == lines
    assert diagnostic(arguments) == lines


def test_a_diagnostic_is_bounded_whatever_was_sent() -> None:
    """R-008."""
    long = "x" * 10_000
    lines = diagnostic({"text": "a", "items": [{"title": i, "count": long} for i in range(50)], "é" * 9000: long})
    assert lines[-1] == "- and 96 more"
    assert len(lines) == 6
    assert all(len(line) < 500 for line in lines)


def test_deep_arguments_are_refused_and_not_followed_for_ever() -> None:
    """H13."""
    deep: Any = 1
    for _ in range(180):
        deep = [deep]
    assert "items" in diagnostic({"text": "a", "items": deep})[0]


def test_an_example_that_cannot_be_made_gives_way_to_the_required_fields() -> None:
    """R-008."""

    @tool
    def act(code: Annotated[str, pydantic.Field(pattern="^[A-Z]{3}-[0-9]+$")], other: int) -> None: ...

    with pytest.raises(InvalidArgumentsError) as raised:
        act.bind({"code": "x", "other": 1})
    assert raised.value.diagnostic.splitlines()[1:] == [
        '- code: expected string, pattern "^[A-Z]{3}-[0-9]+$"; received string "x"',
        "Required fields: code, other",
    ]


def test_a_pattern_only_the_checker_of_arguments_knows_still_gives_a_diagnostic() -> None:
    """R-008."""

    @tool
    def act(code: Annotated[str, pydantic.Field(pattern=r"^\p{Lu}+$")]) -> None: ...

    with pytest.raises(InvalidArgumentsError) as raised:
        act.bind({"code": "x"})
    assert '- code: expected string, pattern "^\\\\p{Lu}+$"; received string "x"' in raised.value.diagnostic


@pytest.mark.parametrize(
    ("annotation", "example"),
    [
        (Annotated[int, pydantic.Field(gt=5)], 6),
        (Annotated[float, pydantic.Field(ge=0, le=0.5)], 0.5),
        (Annotated[str, pydantic.Field(min_length=6, max_length=7)], "textxx"),
        (Annotated[list[int], pydantic.Field(min_length=2)], [1, 1]),
        (tuple[int, str], [1, "text"]),
        (datetime, "2025-01-31T12:00:00Z"),
        (Kind, "good"),
        (bool, True),
        (Item, {"title": "text", "count": 1}),
        (When, {"at": "2025-01-31T12:00:00Z"}),
        (Cat | None, {"species": "cat", "lives": 1}),
        (Annotated[str, pydantic.Field(examples=["J-1"])], "J-1"),
        (dict[str, int], {}),
    ],
)
def test_an_example_fits_the_schema_it_is_made_from(annotation: Any, example: Any) -> None:
    """R-008."""

    def act(x: Any) -> None: ...

    act.__annotations__["x"] = annotation
    offered = tool(act)
    with pytest.raises(InvalidArgumentsError) as raised:
        offered.bind({})
    shown = raised.value.diagnostic.splitlines()[-1].removeprefix("Example that fits: ")
    assert pydantic.TypeAdapter(Any).validate_json(shown) == {"x": example}
    offered.bind({"x": example})


# The one form of what comes to the same call


class Options(pydantic.BaseModel):
    fast: bool = False
    depth: float = 3


@tool
def ship(
    item: str,
    count: int = 1,
    weight: float = 2,
    options: Options | None = None,
    at: datetime | None = None,
    mark: str = pydantic.Field(default_factory=lambda: uuid.uuid4().hex),
) -> str:
    """Ships."""
    return item


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"item": "x"}, {"item": "x", "count": 1, "weight": 2, "options": None, "at": None}),
        ({"item": "x", "weight": 3}, {"item": "x", "weight": 3.0}),
        ({"item": "x", "at": "2026-01-01T00:00:00Z"}, {"item": "x", "at": "2026-01-01T00:00:00+00:00"}),
    ],
    ids=["defaults", "numbers", "instants"],
)
def test_arguments_that_come_to_the_same_call_have_one_form(one: Any, other: Any) -> None:
    """C8, O10."""
    assert ship.form(one) == ship.form(other)
    assert ship.form(one) == ship.form(one)  # the mark is drawn anew each time


@pytest.mark.parametrize("other", [{"count": 2}, {"weight": 2.5}, {"options": {}}, {"mark": "m"}], ids=str)
def test_arguments_that_come_to_another_call_have_another_form(other: Any) -> None:
    """C8."""
    assert ship.form({"item": "x", **other}) != ship.form({"item": "x"})


class Start(pydantic.BaseModel):
    kind: Literal["start"] = "start"
    id: int
    hidden: int = pydantic.Field(0, exclude=True)


class Stop(pydantic.BaseModel):
    kind: Literal["stop"] = "stop"
    id: int


def test_records_that_differ_in_a_default_or_in_what_is_not_shown_have_another_form() -> None:
    """C8: a start that may have happened must not hold a stop back."""

    @tool
    def act(action: Annotated[Start | Stop, pydantic.Field(discriminator="kind")]) -> str:
        """Acts."""
        return action.kind

    forms = [{"kind": "start", "id": 1}, {"kind": "stop", "id": 1}, {"kind": "start", "id": 1, "hidden": 1}]
    shown = [act.form({"action": action}) for action in forms]
    assert all(one != other for one, other in combinations(shown, 2))


def test_arguments_that_do_not_fit_are_their_own_form() -> None:
    """C8: a later release of a tool may take other ones than those on record."""
    assert ship.form({"items": 3}) == {"items": 3}


def test_the_form_of_a_call_runs_no_validator_and_yet_knows_a_default() -> None:
    """C8, R-012: calls are compared on replay, too."""
    looked: list[int] = []

    def look(value: int) -> int:
        looked.append(value)
        return value

    @tool
    def send(to: str, copies: Annotated[int, pydantic.AfterValidator(look)] = 1) -> str:
        """Sends."""
        return to

    assert send.form({"to": "bob", "copies": 1}) == send.form({"to": "bob"})
    assert send.form({"to": "bob", "copies": 2}) != send.form({"to": "bob"})
    assert looked == []
