"""One assembler for every stream: a model's events in, one turn or one fault out.

Owns which fragment belongs to which call and what a stream may do. A fault of the stream (it broke its protocol, ended
early or went over a cap) fails the attempt; a fault in the content of one call stays in that call, and the turn stands.
Refuses to know any provider: identity hints come as the provider sent them, and nothing is keyed by an id alone.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, assert_never

from perdure.contracts.limits import LARGEST
from perdure.contracts.messages import (
    AssistantTurn,
    CallFault,
    CallPart,
    OpaquePart,
    Part,
    StopReason,
    TextPart,
    ToolCall,
    Usage,
)
from perdure.errors import StreamFaultError
from perdure.ports import CallDelta, CallDone, Degraded, ModelEvent, OpaqueDelta, TextDelta, TurnDone, UsageReport
from perdure.runtime.arguments import RAW_LIMIT, parse_arguments, size, storable

MAX_TEXT_BYTES = 1 << 20
"""Text of one turn, in bytes of UTF-8."""
MAX_ARGUMENT_BYTES = 1 << 20
"""Arguments of one call, in bytes of UTF-8."""
MAX_CALLS = 128
"""Calls of one turn."""
MAX_BLOCKS = 128
"""Text and opaque parts of one turn; calls are counted on their own."""
MAX_NAME_BYTES = 256
"""A call's name or wire id, in bytes of UTF-8."""

_COUNTS = ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens")
_STRUCTURE = re.compile(r'["\\{}\[\]]|[^\s"\\{}\[\]]+')


class _OpenCall:
    """A call whose fragments are still coming."""

    __slots__ = ("_balance", "_scanned", "bytes", "done", "fragments", "index", "name", "repeated", "wire_id")

    def __init__(self, name: str, index: int | None, wire_id: str | None) -> None:
        self.name, self.index, self.wire_id = name, index, wire_id
        self.fragments: list[str] = []
        self.bytes = 0
        self.done = False
        self.repeated = False
        """Its opening came once more after its arguments were whole: arguments that follow are another call's."""
        self._scanned = 0
        self._balance = _Balance()

    def whole(self) -> bool:
        """Whether what has come is a whole JSON value by its brackets and quotes. Each fragment is looked at once."""
        for fragment in self.fragments[self._scanned :]:
            self._balance.feed(fragment)
        self._scanned = len(self.fragments)
        return self.done or self._balance.closed

    def blank(self) -> bool:
        return not any(fragment.strip() for fragment in self.fragments)


class _Balance:
    """Follows brackets and quotes through the fragments of one JSON text."""

    __slots__ = ("_depth", "_escaped", "_quoted", "_seen")

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped, self._seen = 0, False, False, False

    def feed(self, fragment: str) -> None:
        for mark in _STRUCTURE.findall(fragment):
            self._seen = True
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = mark == "\\"
                self._quoted = mark != '"'
            elif mark == '"':
                self._quoted = True
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1

    @property
    def closed(self) -> bool:
        return self._seen and self._depth <= 0 and not self._quoted


class TurnAssembler:
    """Puts one turn together from the events of one stream.

    Args:
        strict: the stream must close with `TurnDone`; its bare end is a fault.
    """

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._parts: list[list[str] | _OpenCall | OpaquePart] = []
        self._text: list[str] | None = None
        """The block of text that is open: the last part, while that is text."""
        self._calls: list[_OpenCall] = []
        self._current: _OpenCall | None = None
        self._text_bytes = 0
        self._blocks = 0
        self._closes_calls = False
        self._usage: Usage | None = None
        self._end: TurnDone | None = None

    @property
    def usage(self) -> Usage | None:
        """The last usage the stream reported."""
        return self._usage

    def feed(self, event: ModelEvent) -> None:
        """Takes the next event.

        Raises:
            StreamFaultError: the event breaks the protocol (`after_end`, `unknown_call`, `conflicting_call`) or a cap
                (`too_large`). The attempt is lost; feed nothing more.
        """
        if self._end is not None:
            self._fail("after_end", f"a {type(event).__name__} came after the event that ends the reply")
        match event:
            case TextDelta():
                self._add_text(event.text)
            case CallDelta():
                self._add_fragment(event)
            case CallDone():
                self._close_call(event)
            case OpaqueDelta():
                self._count_block()
                self._add_part(OpaquePart(event.provider, event.data))
            case UsageReport():
                self._take_usage(event.usage)
            case TurnDone():
                self._end = event
            case Degraded():
                pass  # about the request and no part of the reply: whoever asked hears of it
            case _:
                assert_never(event)

    def finish(self) -> AssistantTurn:
        """The turn, once the stream has ended.

        Raises:
            StreamFaultError: the stream ended early: `no_terminal` for a strict client without its closing event,
                `unfinished_call` for a call that was never closed or, on a bare end, whose arguments are no whole JSON.
        """
        if self._end is None and self._strict:
            self._fail("no_terminal", "the stream ended without the event that ends the reply")
        stop = self._end.stop if self._end else StopReason.CALLS if self._calls else StopReason.END
        content = tuple(self._part(part, stop) for part in self._parts)
        return AssistantTurn(content, stop, self._usage or Usage(), self._end.model if self._end else None)

    def _part(self, part: list[str] | _OpenCall | OpaquePart, stop: StopReason) -> Part:
        if isinstance(part, list):
            return TextPart(storable("".join(part)))
        if isinstance(part, OpaquePart):
            return part
        return CallPart(self._finished(part, cut=stop is StopReason.LENGTH))

    def _finished(self, call: _OpenCall, *, cut: bool) -> ToolCall:
        if self._closes_calls and not call.done and not cut:
            self._fail("unfinished_call", f"the call of {call.name!r} was opened and never closed")
        raw = storable("".join(call.fragments))
        arguments, fault = parse_arguments(raw, cut=cut, closed=call.done)
        if fault is CallFault.NOT_JSON and self._end is None:
            self._fail("unfinished_call", f"the stream ended inside the arguments of {call.name!r}")
        wire_id = None if call.wire_id is None else storable(call.wire_id)
        return ToolCall(storable(call.name), arguments, fault, raw[:RAW_LIMIT] if fault else None, wire_id)

    def _take_usage(self, usage: Usage) -> None:
        for name in _COUNTS:
            count: object = getattr(usage, name)
            if count is not None and (type(count) is not int or not 0 <= count <= LARGEST):
                self._fail("protocol", f"{name} of the usage is {count!r:.80}, no count within 64 bits")
        self._usage = usage

    def _add_text(self, text: str) -> None:
        if not text:
            return
        # `size`, without the call for the usual case: a reply has hundreds of fragments.
        self._text_bytes += len(text) if text.isascii() else size(text)
        if self._text_bytes > MAX_TEXT_BYTES:
            self._fail("too_large", f"the text of the reply is over {MAX_TEXT_BYTES} bytes")
        if self._text is None:
            self._count_block()
            opened: list[str] = []
            self._add_part(opened)
            self._text = opened
        self._text.append(text)

    def _add_part(self, part: list[str] | _OpenCall | OpaquePart) -> None:
        self._parts.append(part)
        self._text = None

    def _count_block(self) -> None:
        self._blocks += 1
        if self._blocks > MAX_BLOCKS:
            self._fail("too_large", f"the reply has more than {MAX_BLOCKS} blocks of content")

    def _add_fragment(self, event: CallDelta) -> None:
        call = self._current
        if event.name or event.wire_id or call is None or (event.index is not None and event.index != call.index):
            call = self._place(event)
        if call.repeated and event.arguments.strip():
            call = self._open(call.name, call.index, call.wire_id)
        if call.done and event.arguments:
            self._fail("unknown_call", f"a fragment came for the call of {call.name!r} after it was closed")
        self._current = call
        if event.arguments:
            call.fragments.append(event.arguments)
            self._count_arguments(call, call.bytes + size(event.arguments))

    def _place(self, event: CallDelta) -> _OpenCall:
        """The call a fragment belongs to, opened when the fragment opens one."""
        name, wire_id = event.name or None, event.wire_id or None
        call = self._find(event.index, wire_id, opening=name is not None)
        if call is None:
            if name is None:
                self._fail("unknown_call", f"a fragment came for a call that was never opened ({_hints(event)})")
            return self._open(name, event.index, wire_id)
        if name is not None:
            return self._reopen(call, event, name, wire_id)
        call.wire_id = call.wire_id or wire_id
        return call

    def _reopen(self, call: _OpenCall, event: CallDelta, name: str, wire_id: str | None) -> _OpenCall:
        """A named fragment whose hints lead to a call that is there: it is named again, or another has equal hints."""
        hinted = event.index is not None or wire_id is not None
        if call.whole():
            if hinted and call.name == name and not event.arguments.strip():
                call.repeated = True
                return call
            return self._open(name, event.index, wire_id)
        if not hinted and call.blank():
            return self._open(name, event.index, wire_id)
        if call.name != name:
            self._fail("conflicting_call", f"one call was named {call.name!r} and then {name!r}")
        call.wire_id = call.wire_id or wire_id
        return call

    def _find(self, index: int | None, wire_id: str | None, *, opening: bool) -> _OpenCall | None:
        """The latest call the hints lead to: by index and id, by index, by id alone; without hints the current one."""
        if index is None and wire_id is None:
            return self._current
        latest = self._calls[::-1]
        if index is not None:
            here = [call for call in latest if call.index == index]
            same = [call for call in here if call.wire_id == wire_id] if wire_id else []
            unnamed = [call for call in here if call.wire_id is None or wire_id is None]
            if same or unnamed:
                return (same or unnamed)[0]
        for call in latest:
            # A fragment that opens a call at another index is another call, whatever its id.
            if wire_id is not None and call.wire_id == wire_id and not (opening and index != call.index):
                return call
        return None

    def _open(self, name: str, index: int | None, wire_id: str | None) -> _OpenCall:
        if len(self._calls) >= MAX_CALLS:
            self._fail("too_large", f"the reply has more than {MAX_CALLS} calls")
        for word, what in ((name, "name"), (wire_id or "", "id")):
            if size(word) > MAX_NAME_BYTES:
                self._fail("too_large", f"the {what} of a call is over {MAX_NAME_BYTES} bytes")
        call = _OpenCall(name, index, wire_id)
        self._calls.append(call)
        self._add_part(call)
        return call

    def _close_call(self, event: CallDone) -> None:
        wire_id = event.wire_id or None
        call = self._find_unclosed(event.index, wire_id)
        if call is None:
            self._fail("unknown_call", f"a call was closed that was never opened or is closed ({_hints(event)})")
        if event.name and event.name != call.name:
            self._fail("conflicting_call", f"one call was named {call.name!r} and then {event.name!r}")
        self._closes_calls = call.done = True
        call.wire_id = call.wire_id or wire_id
        if event.arguments is not None:
            call.fragments = [event.arguments]
            self._count_arguments(call, size(event.arguments))

    def _find_unclosed(self, index: int | None, wire_id: str | None) -> _OpenCall | None:
        unclosed = [call for call in self._calls if not call.done]
        if index is None and wire_id is None:
            return self._current if self._current in unclosed else None
        for call in unclosed:
            if (index is None or call.index == index) and (wire_id is None or call.wire_id in (None, wire_id)):
                return call
        return None

    def _count_arguments(self, call: _OpenCall, count: int) -> None:
        call.bytes = count
        if count > MAX_ARGUMENT_BYTES:
            self._fail("too_large", f"the arguments of {call.name!r} are over {MAX_ARGUMENT_BYTES} bytes")

    def _fail(self, kind: str, found: str) -> NoReturn:
        raise StreamFaultError(kind, found, where="the model's reply", usage=self._usage)


def _hints(event: CallDelta | CallDone) -> str:
    return f"index {event.index}, id {event.wire_id!r:.80}"


async def assemble(
    stream: AsyncIterator[ModelEvent],
    *,
    strict: bool,
    idle_timeout_s: float,
    timeout_s: float,
    on_delta: Callable[[ModelEvent], None] | None = None,
    degradations: list[Degraded] | None = None,
) -> AssistantTurn:
    """Reads one stream to its end, within its time limits, and closes it whatever happens.

    Args:
        strict: as the client says of itself.
        idle_timeout_s: longest silence between two events, in seconds.
        timeout_s: longest time for all of it, in seconds.
        on_delta: called with each event once it was accepted; it must not block or raise.
        degradations: gets each `Degraded` of the stream, also when the attempt fails.

    Raises:
        StreamFaultError: a fault of `TurnAssembler`, or `idle` or `timeout` when a limit passed. `usage` is the last
            one reported.
        ModelError: whatever the client raised.
    """
    assembler = TurnAssembler(strict)
    watch = _Watch(idle_timeout_s, timeout_s)
    now, feed = watch.now, assembler.feed
    try:
        async with watch:
            try:
                async for event in stream:
                    watch.last = now()
                    feed(event)
                    if type(event) is Degraded and degradations is not None:
                        degradations.append(event)
                    if on_delta is not None:
                        on_delta(event)
            finally:
                close = getattr(stream, "aclose", None)
                if close is not None:
                    await close()
    except StreamFaultError as fault:
        fault.usage = fault.usage or assembler.usage
        raise
    return assembler.finish()


class _Watch:
    """Ends the block it guards when nothing was heard for too long, or when it takes too long in all.

    One timer looks at the time of the last event when it fires: re-arming a timer for each event would cost more than
    the event itself.
    """

    def __init__(self, idle_s: float, total_s: float) -> None:
        self._idle_s, self._total_s = idle_s, total_s
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self.now = self._loop.time
        self.last = self.now()
        """When something came: set to `now()` by whoever hears it, once an event, so that it costs no call more."""
        self._end = self.last + total_s

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._look()

    def _look(self) -> None:
        due = min(self.last + self._idle_s, self._end)
        if self.now() >= due:
            self._limit.reschedule(due)
        else:
            self._timer = self._loop.call_at(due, self._look)

    async def __aexit__(self, *raised: Any) -> None:  # noqa: PYI036 (handed on as they came)
        self._timer.cancel()
        try:
            await self._limit.__aexit__(*raised)
        except TimeoutError as error:
            if self.now() >= self._end:
                kind, found = "timeout", f"the reply took longer than {self._total_s:g} s"
            else:
                kind, found = "idle", f"the stream was silent for {self._idle_s:g} s"
            raise StreamFaultError(kind, found, where="the model's reply") from error
