"""`@tool`: a function, its schema and its effect, offered to a model.

Owns what a declaration may say and how one attempt runs. Knows nothing about journals, retries or permits.
"""

import asyncio
import difflib
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

from perdure.calls import CallContext
from perdure.contracts.contract import JsonObject
from perdure.contracts.messages import Effect, ToolDescriptor
from perdure.errors import ToolDefinitionError
from perdure.ports import BoundCall
from perdure.tools.blocking import as_error, run_blocking

if TYPE_CHECKING:
    from perdure.tools.parameters import Parameters

P = ParamSpec("P")
R = TypeVar("R")

EffectWord = Effect | Literal["read", "idempotent", "write"]

MAX_RETRIES = 2
"""Live retries of one call: three attempts in all."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every provider takes as a function name."""


class FunctionTool(Generic[P, R]):
    """A function offered to a model. Calling it calls the plain function.

    Attributes:
        descriptor: what the model is told, and the effect.
        timeout_s: longest time for one attempt, in seconds; None without a limit.
        retries: live retries after a raised error.
    """

    def __init__(
        self,
        function: Callable[P, R],
        descriptor: ToolDescriptor,
        parameters: "Parameters",
        *,
        timeout_s: float | None,
        retries: int,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._parameters = parameters
        self._asynchronous = _is_async(function)
        self.descriptor = descriptor
        self.timeout_s = timeout_s
        self.retries = retries

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What the plain function does."""
        return self._function(*args, **kwargs)

    @property
    def checks_with_user_code(self) -> bool:
        """Whether checking arguments may run a validator of the user's."""
        return self._parameters.runs_functions

    def form(self, arguments: JsonObject) -> JsonObject:
        """The one form of all arguments with which the function would be called the same."""
        return self._parameters.form(arguments)

    def bind(self, arguments: JsonObject) -> BoundCall:
        """Checks the arguments; the returned function runs the tool once with them, as often as it is called.

        An async function runs in the caller's task; a plain one in a daemon thread, left behind by a cancelled caller.

        Raises:
            InvalidArgumentsError: they do not fit.
        """
        checked: list[dict[str, Any]] = [self._parameters.read(self.descriptor.name, arguments)]

        async def run(context: CallContext) -> object:
            # A later attempt reads the arguments anew: the one before may have changed its lists and records.
            values = checked.pop() if checked else self._parameters.read(self.descriptor.name, arguments)
            if self._parameters.context is not None:
                values[self._parameters.context] = context
            try:
                return await self._run(values, context)
            except asyncio.CancelledError as cancelled:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    context.give_up()
                    raise
                raise as_error(cancelled) from cancelled  # the tool's own doing: nobody cancelled this call
            except (SystemExit, GeneratorExit) as ended:
                raise as_error(ended) from ended

        return run

    async def _run(self, values: dict[str, Any], context: CallContext) -> object:
        function: Callable[..., Any] = self._function
        if self._asynchronous:
            return await function(**values)
        result = await run_blocking(functools.partial(function, **values), self.descriptor.name, context.leave)
        return await result if inspect.isawaitable(result) else result


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@overload
def tool(
    *,
    effect: EffectWord = ...,
    name: str | None = ...,
    timeout: float | None = ...,
    retries: int = ...,
    repeatable: bool | None = ...,
    parallel: bool = ...,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    effect: EffectWord = "write",
    name: str | None = None,
    timeout: float | None = None,
    retries: int = 0,
    repeatable: bool | None = None,
    parallel: bool = False,
) -> Any:
    """Offers a function to models: its docstring describes it, its typed parameters are its schema.

    A parameter annotated `CallContext` is given the context of the call and is not shown to the model.

    Args:
        effect: `read` changes nothing; `idempotent` changes something once per `CallContext.idempotency_key`; `write`
            (when nothing is declared) changes something each time, so the runtime never repeats it.
        name: what the model calls it; the function's own name when None. Letters, digits, `_` and `-`, at most 64.
        timeout: longest time for one attempt, in seconds.
        retries: live retries after a raised error, 0 to 2; not for writes.
        repeatable: False refuses the third identical call in a row of circumstances, True never does. None: False for
            writes and idempotent tools, True for reads.
        parallel: adjacent calls of such reads may overlap; reads only.

    Raises:
        ToolDefinitionError: the function cannot be offered, or the declaration makes no sense.
    """
    names = _scope(sys._getframe(1))  # noqa: SLF001 - where annotations written as text can be resolved

    def define(target: Callable[..., Any]) -> FunctionTool[..., Any]:
        where = f"tool function {_function_name(target)}"
        if isinstance(target, FunctionTool):
            raise ToolDefinitionError("it is a tool already", where=where, next="remove one @tool")
        _check_kind(target, where)
        _check_numbers(where, timeout, retries)
        kind = _effect(effect, where)
        _check_effect(kind, where, retries=retries, parallel=parallel)
        return _build(
            target, where, names, _name_of(target, name, where), (kind, parallel, repeatable), (timeout, retries)
        )

    return define if function is None else define(function)


def _build(
    function: Callable[..., Any],
    where: str,
    names: Mapping[str, Any],
    name: str,
    declared: tuple[Effect, bool, bool | None],
    limits: tuple[float | None, int],
) -> FunctionTool[..., Any]:
    from perdure.tools.parameters import parameters_of

    parameters = parameters_of(function, where, names)
    description = inspect.cleandoc(function.__doc__ or "") if _has_own_doc(function) else ""
    effect, parallel, repeatable = declared
    descriptor = ToolDescriptor(name, description or name, parameters.schema, effect, parallel, repeatable)
    return FunctionTool(function, descriptor, parameters, timeout_s=limits[0], retries=limits[1])


def _scope(frame: Any) -> dict[str, Any]:
    """The local names around a definition inside a function; a module's own names are the function's globals anyway."""
    return {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)


def _has_own_doc(function: Any) -> bool:
    return not isinstance(function, functools.partial)


def _function_name(function: Any) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _check_kind(function: Any, where: str) -> None:
    if not callable(function) or isinstance(function, type):
        raise ToolDefinitionError(f"it is no function but {function!r:.80}", where=where, next="decorate a function")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ToolDefinitionError("it yields values one by one", where=where, next="return the whole result")


def _check_numbers(where: str, timeout: object, retries: object) -> None:
    if timeout is not None and not (
        isinstance(timeout, int | float) and not isinstance(timeout, bool) and math.isfinite(timeout) and timeout > 0
    ):
        raise ToolDefinitionError(f"timeout is {timeout!r}", where=where, next="give seconds above zero, or None")
    if isinstance(retries, bool) or not isinstance(retries, int) or retries not in range(MAX_RETRIES + 1):
        raise ToolDefinitionError(f"retries is {retries!r}", where=where, next=f"give 0 to {MAX_RETRIES}")


def _effect(word: object, where: str) -> Effect:
    words = [str(effect) for effect in Effect]
    if isinstance(word, str) and word in words:
        return Effect(word)
    near = difflib.get_close_matches(str(word).lower(), words, 1, cutoff=0.3)
    step = f"did you mean {near[0]!r}? " if near else ""
    raise ToolDefinitionError(f"effect is {word!r}", where=where, next=f"{step}It is one of {', '.join(words)}")


def _check_effect(effect: Effect, where: str, *, retries: int, parallel: bool) -> None:
    if retries and effect is Effect.WRITE:
        raise ToolDefinitionError(
            f"a write with retries={retries} could act twice",
            where=where,
            next='remove retries, or declare effect="idempotent" and hand call.idempotency_key on',
        )
    if parallel and effect is not Effect.READ:
        raise ToolDefinitionError(f"parallel is for reads; this is {effect}", where=where, next="remove parallel=True")


def _name_of(function: Any, name: str | None, where: str) -> str:
    chosen = getattr(function, "__name__", "") if name is None else name
    if not isinstance(chosen, str) or not _NAME.fullmatch(chosen):
        raise ToolDefinitionError(
            f"the name {chosen!r:.80} is not 1 to 64 letters, digits, _ or -",
            where=where,
            next='give one: @tool(name="...")',
        )
    return chosen
