"""Structured answers: the schema shown to the model and the check of what it proposes."""

import dataclasses
from typing import Annotated, Any, TypedDict

import msgspec
import pydantic
import pytest

from perdure.errors import ConfigurationError
from perdure.tools.output import AnswerCheck, check_schema, schema_problem


class Report(pydantic.BaseModel):
    status: str
    effects: Annotated[int, pydantic.Field(ge=0)]


@dataclasses.dataclass
class ReportRecord:
    status: str
    effects: int


class ReportStruct(msgspec.Struct):
    status: str
    effects: int

    def __post_init__(self) -> None:
        if self.status == "odd":
            raise ValueError("no such status")


class ReportTable(TypedDict):
    status: str
    effects: int


class Tree(pydantic.BaseModel):
    children: list["Tree"] = []


SCHEMA = {
    "type": "object",
    "properties": {"status": {"type": "string"}, "effects": {"type": "integer"}},
    "required": ["status", "effects"],
}

MODELS: list[Any] = [Report, ReportRecord, ReportStruct, ReportTable, SCHEMA]


@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_output_model_gives_the_schema_of_an_object(model: Any) -> None:
    """S-040."""
    schema = AnswerCheck(model).schema
    assert schema["type"] == "object"
    assert set(schema["properties"]) == {"status", "effects"}
    assert sorted(schema["required"]) == ["effects", "status"]
    assert "title" not in schema


@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_output_model_takes_what_fits_and_names_what_does_not(model: Any) -> None:
    """S-045, R-008."""
    check = AnswerCheck(model)
    assert check.problem({"status": "done", "effects": 1}) is None
    problem = check.problem({"effects": "1"})
    assert problem is not None
    lines = problem.splitlines()
    assert lines[0] == "The answer does not fit its schema:"
    assert lines[1] == "- status: expected string; received nothing (the field is required)"
    assert lines[2].startswith("- effects: expected integer")
    assert lines[2].endswith('received string "1"')
    assert lines[3].startswith('Example that fits: {"')


@pytest.mark.parametrize("value", ["done", ["done"], None, 5, '{"status": "done", "effects": 1}'])
def test_an_answer_that_is_no_object_does_not_fit(value: Any) -> None:
    """S-045."""
    for model in MODELS:
        problem = AnswerCheck(model).problem(value)
        assert problem is not None
        assert "(the whole value): expected object {" in problem


def test_a_validator_of_the_users_own_speaks_in_its_own_words() -> None:
    """S-045."""
    problem = AnswerCheck(ReportStruct).problem({"status": "odd", "effects": 1})
    assert problem is not None
    assert "no such status" in problem


def test_a_self_referring_model_has_its_object_at_the_top() -> None:
    """S-040."""
    assert AnswerCheck(Tree).schema["type"] == "object"
    assert AnswerCheck(Tree).problem({"children": [{"children": []}]}) is None
    problem = AnswerCheck(Tree).problem({"children": [{"children": 1}]})
    assert problem is not None
    assert "- children[0].children: expected array" in problem


class Opaque:
    pass


BAD_MODELS: dict[str, tuple[Any, str]] = {
    "a list of things": (list[Report], "put the value into a field"),
    "plain text": (str, "put the value into a field"),
    "a class without a schema": (Opaque, "give a pydantic model"),
    "an instance": (Report(status="a", effects=1), "give a pydantic model"),
    "text": ("Report", "give a pydantic model"),
    "a schema of a list": ({"type": "array"}, "put the value into a field"),
    "a schema of anything": ({}, "put the value into a field"),
    "a schema with an unknown type": ({"type": "objet"}, "correct that keyword"),
    "a schema with a broken pattern": ({"type": "object", "patternProperties": {"(": {}}}, "correct that keyword"),
    "a schema with a dead reference": (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}},
        "nothing is fetched",
    ),
    "a schema with a reference to the network": (
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}},
        "nothing is fetched",
    ),
    "a schema with a set": ({"type": "object", "required": {"a"}}, "use JSON types"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_an_output_that_cannot_be_used_is_refused_when_it_is_declared(case: str) -> None:
    """S-040."""
    model, step = BAD_MODELS[case]
    with pytest.raises(ConfigurationError) as raised:
        AnswerCheck(model)
    assert step in raised.value.next
    assert "output" in raised.value.where


def test_references_inside_a_schema_are_followed() -> None:
    """S-045."""
    schema = check_schema({"$defs": {"A": {"$anchor": "a", "type": "integer"}}, "anyOf": [{"$ref": "#a"}]}, "wait")
    assert schema_problem(schema, 1) is None
    assert schema_problem(schema, "1") is not None


def test_an_answer_to_a_wait_is_checked_by_its_schema_in_the_same_words() -> None:
    """R-008."""
    schema = {"type": "boolean"}
    assert schema_problem(schema, True) is None
    assert schema_problem(schema, "yes") == (
        "The answer does not fit its schema:\n"
        '- (the whole value): expected boolean; received string "yes"\n'
        "Example that fits: true"
    )


def test_a_schema_that_cannot_be_used_takes_no_answer() -> None:
    problem = schema_problem({"$ref": "https://example.com/a.json"}, 1)
    assert problem is not None
    assert problem.startswith("The schema cannot be used")
