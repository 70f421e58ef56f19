"""Stand-ins for providers over a real socket: they speak the protocol, and refuse what the real service refuses.

async with wire.serve("openai-chat", [calls(("job_status", {"job_id": "42"})), text("done")]) as server:
    model = OpenAIChat("any", base_url=server.base_url, api_key="none")
"""

from perdure.testing.replies import Reply, ScriptedCall, ScriptExhaustedError, calls, fault, text
from perdure.testing.wire.faults import CutAfter, Reindex, Repeat, Stall, Status
from perdure.testing.wire.protocol import Received, Refusal
from perdure.testing.wire.server import PROTOCOLS, WireServer, serve

__all__ = [
    "PROTOCOLS",
    "CutAfter",
    "Received",
    "Refusal",
    "Reindex",
    "Repeat",
    "Reply",
    "ScriptExhaustedError",
    "ScriptedCall",
    "Stall",
    "Status",
    "WireServer",
    "calls",
    "fault",
    "serve",
    "text",
]
