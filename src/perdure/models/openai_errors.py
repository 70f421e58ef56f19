"""What the OpenAI SDK raises, translated once into `ModelError`. Both OpenAI protocols share it.

Nothing here imports the SDK before it has raised something.
"""

from perdure.errors import ModelError
from perdure.models.failures import Dialect, broken, refused, said_inside, unreadable

DIALECT = Dialect(
    # Codes and types of the provider's error object. Source: the OpenAI API's error codes guide
    # (developers.openai.com, docs/guides/error-codes), which says to go by `error.code` where `error.type` is still
    # `insufficient_quota`.
    kinds={
        "insufficient_quota": "quota",
        "credit_balance_exhausted": "quota",
        "organization_spend_limit_exceeded": "quota",
        "project_spend_limit_exceeded": "quota",
        "billing_hard_limit_reached": "quota",
        "billing_not_active": "quota",
        "context_length_exceeded": "context_too_long",
        "content_filter": "refused",
        "content_policy_violation": "refused",
        "invalid_api_key": "auth",
        "model_not_found": "not_found",
        "server_is_overloaded": "overloaded",
        "slow_down": "overloaded",
        "rate_limit_exceeded": "rate_limited",
        "rate_limit_error": "rate_limited",
        "server_error": "overloaded",
        "service_unavailable_error": "overloaded",
    },
    phrases=(
        # A single request over the whole per-minute allowance comes as a rate limit, but no wait will let it through.
        ("Request too large", "context_too_long"),
        # Compatible servers say it in words only.
        ("maximum context length", "context_too_long"),
    ),
)


def translate(error: Exception, target: str, key: str | None, *, streaming: bool) -> ModelError:
    """The error of one attempt.

    Args:
        error: what the SDK raised.
        target: who was asked, as `provider:name`.
        key: the API key, to be taken out of texts.
        streaming: the reply had begun, so that a lost connection is a broken stream.
    """
    from openai import APIConnectionError, APIError, APIStatusError, APITimeoutError

    if isinstance(error, APIStatusError):
        response = error.response
        return refused(DIALECT, error.status_code, response.text, response.headers, target=target, key=key)
    if isinstance(error, APITimeoutError):
        found = "the provider did not answer in time"
        return broken("timeout", found, target=target, key=key, streaming=streaming)
    if isinstance(error, APIConnectionError):
        found = f"the connection failed ({error.__cause__ or error})"
        return broken("connection", found, target=target, key=key, streaming=streaming)
    if isinstance(error, APIError):
        return said_inside(DIALECT, error.body or {"message": error.message}, target=target, key=key)
    return unreadable(error, target=target, key=key)
