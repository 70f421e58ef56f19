"""From a model's name in an agent file to its client."""

import difflib
import importlib
import importlib.util
from pathlib import Path

from perdure.errors import ConfigurationError
from perdure.named import import_named
from perdure.ports import ModelClient

_PROVIDERS = {
    "openai": "perdure.models.openai_chat:OpenAIChat",
}
"""By provider: the class of its client, made with a name and `base_url`, imported on first use."""


def _made(provider: str, name: str, base_url: str | None) -> ModelClient:
    module, _, attribute = _PROVIDERS[provider].partition(":")
    client: ModelClient = getattr(importlib.import_module(module), attribute)(name, base_url=base_url)
    return client


def found_client(ref: str, *, base_url: str | None = None) -> tuple[ModelClient, bool]:
    """The client a reference names, and whether it was made for this: a module's own client is shared and not closed.

    Args:
        ref: `provider:name`, or `module:attribute` of a `ModelClient` or of a function that makes one.
        base_url: for a provider: another server that speaks its protocol.

    Raises:
        ConfigurationError: nothing is there by that name, or what is there is no model client.
    """
    head, colon, name = ref.partition(":")
    if not (head and colon and name):
        raise _bad(ref, "a model is written provider:name or module:attribute", "write openai:NAME, say")
    if head in _PROVIDERS:
        return _made(head, name, base_url), True
    if "." not in head and importlib.util.find_spec(head) is None:
        near = difflib.get_close_matches(head, _PROVIDERS, n=1, cutoff=0.5)
        known = f"did you mean {near[0]}?" if near else f"known providers are {', '.join(sorted(_PROVIDERS))}"
        raise _bad(ref, f"there is no provider and no module {head!r}", known)
    return _imported(ref, head, name)


def _imported(ref: str, module_name: str, attribute: str) -> tuple[ModelClient, bool]:
    thing: object = import_named(module_name, attribute, folder=Path.cwd(), where=_where(ref))
    made = callable(thing) and not _is_client(thing)
    if callable(thing) and made:
        try:
            thing = thing()
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise _bad(ref, f"calling it raised {type(error).__name__}: {error}", "correct it") from error
    if not _is_client(thing):
        raise _bad(ref, f"{attribute!r} in {module_name} is no ModelClient ({type(thing).__name__})", "name one")
    return thing, made  # type: ignore[return-value]  # checked by shape just above


def _is_client(thing: object) -> bool:
    return not isinstance(thing, type) and all(hasattr(thing, name) for name in ("target", "strict", "stream", "close"))


def _bad(ref: str, found: str, next: str) -> ConfigurationError:
    return ConfigurationError(found, where=_where(ref), next=next)


def _where(ref: str) -> str:
    return f"model {ref!r}"
