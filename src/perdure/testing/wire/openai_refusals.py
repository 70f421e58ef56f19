"""How the OpenAI API words its refusals: one function per form, so that each rule says only what it looks at."""

from perdure.contracts.contract import JsonValue
from perdure.testing.wire.protocol import Refusal


def kind_of(value: JsonValue) -> str:
    """The JSON type of a value with its article, as the API writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a decimal"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def wrong_type(rule: str, param: str, expected: str, value: JsonValue) -> Refusal:
    """A value of another JSON type."""
    found = f"Invalid type for '{param}': expected {expected}, but got {kind_of(value)} instead."
    return Refusal(rule, found, param=param, code="invalid_type")


def missing(rule: str, param: str) -> Refusal:
    """A required parameter that is not there."""
    return Refusal(rule, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def empty_array(rule: str, param: str) -> Refusal:
    """An array that must hold something."""
    found = f"Invalid '{param}': empty array. Expected an array with minimum length 1, but got an empty array instead."
    return Refusal(rule, found, param=param, code="empty_array")


def long_array(rule: str, param: str, limit: int, length: int) -> Refusal:
    """An array with too many items."""
    found = (
        f"Invalid '{param}': array too long. Expected an array with maximum length {limit}, "
        f"but got an array with length {length} instead."
    )
    return Refusal(rule, found, param=param, code="array_above_max_length")


def empty_string(rule: str, param: str) -> Refusal:
    """A string that must hold something."""
    found = (
        f"Invalid '{param}': empty string. Expected a string with minimum length 1, but got an empty string instead."
    )
    return Refusal(rule, found, param=param, code="empty_string")


def long_string(rule: str, param: str, limit: int, length: int) -> Refusal:
    """A string with too many characters."""
    found = (
        f"Invalid '{param}': string too long. Expected a string with maximum length {limit}, "
        f"but got a string with length {length} instead."
    )
    return Refusal(rule, found, param=param, code="string_above_max_length")


def bad_pattern(rule: str, param: str, pattern: str) -> Refusal:
    """A string of other characters."""
    found = f"Invalid '{param}': string does not match pattern. Expected a string that matches the pattern '{pattern}'."
    return Refusal(rule, found, param=param, code="invalid_value")


def not_among(rule: str, param: str, value: JsonValue, known: tuple[str, ...]) -> Refusal:
    """A word the API does not know."""
    listed = ", ".join(f"'{word}'" for word in known[:-1]) + f", and '{known[-1]}'"
    found = f"Invalid value: '{value}'. Supported values are: {listed}."
    return Refusal(rule, found, param=param, code="invalid_value")


def outside(rule: str, param: str, value: float, low: float, high: float | None) -> Refusal | None:
    """A number below or above what is taken; None when it is within."""
    kind = "integer" if isinstance(low, int) else "decimal"
    if value < low:
        found = f"Invalid '{param}': {kind} below minimum value. Expected a value >= {low}, but got {value} instead."
        return Refusal(rule, found, param=param, code=f"{kind}_below_min_value")
    if high is not None and value > high:
        found = f"Invalid '{param}': {kind} above maximum value. Expected a value <= {high}, but got {value} instead."
        return Refusal(rule, found, param=param, code=f"{kind}_above_max_value")
    return None
