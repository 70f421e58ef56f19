"""The testing kit, for users too: scripted models, a provider's protocol over a real socket, clocks, crash sweeps.

Each name is loaded when it is first used. `wire` is a package of its own: `from perdure.testing import wire`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.testing.clocks import ManualClock, SeededEntropy
    from perdure.testing.conformance import store_conformance
    from perdure.testing.crashing import CrashingStore
    from perdure.testing.replies import Reply, ScriptExhaustedError, calls, fault, text
    from perdure.testing.scripted import ScriptedModel
    from perdure.testing.sweeping import sweep

_HOME_OF = {
    "CrashingStore": "perdure.testing.crashing",
    "ManualClock": "perdure.testing.clocks",
    "Reply": "perdure.testing.replies",
    "ScriptExhaustedError": "perdure.testing.replies",
    "ScriptedModel": "perdure.testing.scripted",
    "SeededEntropy": "perdure.testing.clocks",
    "calls": "perdure.testing.replies",
    "fault": "perdure.testing.replies",
    "store_conformance": "perdure.testing.conformance",
    "sweep": "perdure.testing.sweeping",
    "text": "perdure.testing.replies",
}

__all__ = [
    "CrashingStore",
    "ManualClock",
    "Reply",
    "ScriptExhaustedError",
    "ScriptedModel",
    "SeededEntropy",
    "calls",
    "fault",
    "store_conformance",
    "sweep",
    "text",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'perdure.testing' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
