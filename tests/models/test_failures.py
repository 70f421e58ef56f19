"""Reading what a provider says when it refuses."""

import pytest

from perdure.models.failures import masked, retry_after

DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "1500", "retry-after": "60"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "60"}, 60.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": DATE}, 30.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:27:00 GMT", "date": DATE}, 0.0),
        ({"retry-after": DATE}, 0.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "Wed, 99 Oct 2015 07:28:00 GMT"}, None),
    ],
)
def test_the_wait_a_provider_asks_for_is_read_and_nonsense_is_none(
    headers: dict[str, str], seconds: float | None
) -> None:
    """R-148: absent is not zero; a wait is only what was said."""
    assert retry_after(headers) == seconds


def test_a_key_is_taken_out_of_texts_and_so_is_what_looks_like_one() -> None:
    """R-162."""
    assert masked("bad key hunter2hunter2!", "hunter2hunter2") == "bad key [key]!"
    assert (
        masked("Incorrect API key provided: sk-proj-ab***xyz. Look", None) == "Incorrect API key provided: [key] Look"
    )
    assert len(masked("x" * 10_000, None)) == 500
