"""How one attempt runs: async functions in the caller's task, blocking ones in a daemon thread."""

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from perdure.calls import CallContext
from perdure.tools.blocking import run_blocking
from perdure.tools.define import tool

PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("PLACE", default="nowhere")


def context() -> CallContext:
    return CallContext("run", "call", 1, 1, "key", None)


async def test_an_async_function_runs_in_the_callers_task() -> None:
    """S-050."""

    @tool
    async def act() -> object:
        return asyncio.current_task(), threading.current_thread()

    assert await act.bind({})(context()) == (asyncio.current_task(), threading.current_thread())


async def test_a_blocking_function_runs_in_a_daemon_thread_and_the_loop_goes_on() -> None:
    """S-050."""
    release = threading.Event()

    @tool
    def act(call: CallContext) -> object:
        assert release.wait(10)
        return threading.current_thread().daemon, threading.current_thread() is threading.main_thread(), call.attempt

    running = asyncio.ensure_future(act.bind({})(context()))
    await asyncio.sleep(0.01)
    assert not running.done()
    release.set()
    assert await running == (True, False, 1)


async def test_a_blocking_function_sees_the_callers_context_variables() -> None:
    """S-050."""

    @tool
    def act() -> str:
        seen = PLACE.get()
        PLACE.set("inside")
        return seen

    PLACE.set("outside")
    assert await act.bind({})(context()) == "outside"
    assert PLACE.get() == "outside"


async def test_a_cancelled_call_is_told_and_its_thread_left_alone() -> None:
    """S-050."""
    told = threading.Event()

    @tool
    def act(call: CallContext) -> None:
        while not call.cancelled:
            time.sleep(0.001)
        told.set()

    given = context()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await act.bind({})(given)
    assert given.cancelled
    assert await asyncio.to_thread(told.wait, 5)


async def test_a_cancelled_async_call_is_told_too() -> None:
    """S-050."""

    @tool
    async def act() -> None:
        await asyncio.sleep(60)

    given = context()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await act.bind({})(given)
    assert given.cancelled


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
async def test_what_would_end_a_thread_becomes_an_error_of_the_call(raised: BaseException) -> None:
    """S-050."""

    @tool
    def act() -> None:
        raise raised

    with pytest.raises(RuntimeError, match=f"the tool raised {type(raised).__name__}"):
        await act.bind({})(context())


async def test_a_blocking_function_may_raise_stop_iteration() -> None:
    """S-050."""

    @tool
    def act() -> object:
        return next(iter(()))

    with pytest.raises(RuntimeError, match="the tool raised StopIteration"):
        await act.bind({})(context())


@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError()])
async def test_an_async_function_that_ends_itself_raises_an_error_of_the_call(raised: BaseException) -> None:
    """S-050."""

    @tool
    async def act() -> None:
        raise raised

    given = context()
    with pytest.raises(RuntimeError, match=f"the tool raised {type(raised).__name__}"):
        await act.bind({})(given)
    assert not given.cancelled


async def test_a_tools_own_error_reaches_the_caller_as_it_is() -> None:
    """S-050."""
    error = LookupError("mine")

    @tool
    def act() -> None:
        raise error

    with pytest.raises(LookupError) as raised:
        await act.bind({})(context())
    assert raised.value is error


async def test_a_plain_function_that_returns_an_awaitable_is_awaited() -> None:
    """S-050."""

    async def later() -> int:
        return 3

    @tool
    def act() -> Any:
        return later()

    assert await act.bind({})(context()) == 3


async def test_what_a_function_returns_is_handed_on_as_it_is() -> None:
    """H07."""
    value = {1, 2}

    @tool
    def act() -> object:
        return value

    assert await act.bind({})(context()) is value


def test_a_stuck_blocking_function_does_not_hold_the_process() -> None:
    """S-050."""
    program = (
        "import asyncio, time\n"
        "from perdure.calls import CallContext\n"
        "from perdure.tools.define import tool\n"
        "@tool\n"
        "def act() -> None:\n    time.sleep(600)\n"
        "async def main():\n"
        "    try:\n"
        "        async with asyncio.timeout(0.05):\n"
        "            await act.bind({})(CallContext('r', 'c', 1, 1, None, None))\n"
        "    except TimeoutError:\n        print('timed out')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=30)
    assert done.stdout == b"timed out\n"
    assert done.stderr == b""


def test_a_thread_that_outlives_the_loop_says_nothing() -> None:
    """S-050."""
    program = (
        "import asyncio, time\n"
        "from perdure.calls import CallContext\n"
        "from perdure.tools.define import tool\n"
        "@tool\n"
        "def act() -> None:\n    time.sleep(0.2)\n"
        "async def main():\n"
        "    asyncio.ensure_future(act.bind({})(CallContext('r', 'c', 1, 1, None, None)))\n"
        "    await asyncio.sleep(0.01)\n"
        "asyncio.run(main())\n"
        "time.sleep(0.4)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=30)
    assert done.stderr == b""


def test_an_error_that_comes_in_the_event_loops_last_turn_is_printed_by_nobody() -> None:
    """H26: no callback of anybody runs after that turn."""
    loop, go_on = asyncio.new_event_loop(), threading.Event()
    heard: list[str] = []
    loop.set_exception_handler(lambda _, context: heard.append(context["message"]))

    def fails() -> None:
        go_on.wait(30)
        raise ValueError("too late")

    async def given_up() -> None:
        waiting = asyncio.ensure_future(run_blocking(fails, "fails", lambda _: None))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})

    loop.run_until_complete(given_up())
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "perdure-tool-fails":
            thread.join(30)
    loop.call_soon(loop.stop)
    loop.run_forever()  # one turn
    loop.close()
    gc.collect()
    assert heard == []
