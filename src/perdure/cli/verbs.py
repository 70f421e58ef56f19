"""The verbs and their options, as written behind `perdure`. Each hands its values on to the module that does it."""

# ruff: noqa: PLR0913, PLR0917 - each parameter of a verb is an option of it

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from perdure.cli.arguments import pairs, store_url, task_input
from perdure.release import VERSION

app = typer.Typer(
    help="A durable agent runtime: kill it anywhere, and it resumes.",
    epilog="Exit codes: 0 completed, 1 any unsuccessful end, 2 usage, configuration or unknown thing, 3 parked, "
    "4 refused, 130 interrupted.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help needs no rich, which takes longer to load than the help to print
    pretty_exceptions_enable=False,
)


def run_ids(context: typer.Context, incomplete: str) -> list[str]:
    """What a shell offers for a run's id."""
    from perdure.cli.completion import known_run_ids

    return known_run_ids(_store(context, context.params.get("store")), incomplete)


Store = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="The store; else $PERDURE_STORE, else sqlite:./perdure.db."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line; errors too.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print each event to standard error, as on a terminal.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", autocompletion=run_ids)]
Ref = Annotated[
    str | None,
    typer.Option("--agent", metavar="REF", help="The agent, as file.toml or module:attribute; default: as recorded."),
]
Model = Annotated[
    str | None, typer.Option("--model", metavar="M", help="Another model, as provider:name or module:attribute.")
]
By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who decides; recorded.")]
Resume = Annotated[bool, typer.Option("--resume", help="Drive the run on afterwards.")]


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    store: Store = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> int:
    context.obj = store
    if version:
        typer.echo(f"perdure {VERSION}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    return 0


def _store(context: typer.Context, given: str | None) -> str:
    before_the_verb = context.obj
    return store_url(given or (before_the_verb if isinstance(before_the_verb, str) else None))


def _done(work: Coroutine[Any, Any, int]) -> int:
    return asyncio.run(work)


@app.command()
def run(
    context: typer.Context,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="file.toml or module:attribute.")],
    input: Annotated[
        str | None, typer.Option("--input", metavar="TEXT", help="The task; @FILE takes it from a file.")
    ] = None,
    input_json: Annotated[str | None, typer.Option("--input-json", metavar="JSON", help="The task as JSON.")] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="1 to 64 of A-Z a-z 0-9 . _ -; default: a new one.")
    ] = None,
    model: Model = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="K=V", help="A label of the run; may be repeated.")
    ] = None,
    store: Store = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Start a run and drive it until it ends or parks."""
    from perdure.cli.driving import run_agent

    task, labels = task_input(input, input_json, "perdure run"), pairs(label or (), "--label K=V")
    url = _store(context, store)
    return _done(run_agent(url, agent, task, run_id=run_id, model=model, labels=labels, as_json=json, verbose=verbose))


@app.command()
def resume(
    context: typer.Context,
    run: RunId,
    agent: Ref = None,
    model: Model = None,
    store: Store = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Drive a run on: replay what is recorded, then go on.

    Of a run that ended, print the outcome.
    """
    from perdure.cli.driving import resume_run

    return _done(resume_run(_store(context, store), run, ref=agent, model=model, as_json=json, verbose=verbose))


@app.command()
def recover(
    context: typer.Context, agent: Ref = None, store: Store = None, json: Json = False, verbose: Verbose = False
) -> int:
    """Drive every run that is due.

    Due are those that neither ended nor are held nor parked, and those whose wake time has come.
    """
    from perdure.cli.driving import recover_runs

    return _done(recover_runs(_store(context, store), ref=agent, as_json=json, verbose=verbose))


@app.command("list")
def list_(context: typer.Context, store: Store = None, json: Json = False) -> int:
    """List the runs of the store."""
    from perdure.cli.looking import list_runs

    return _done(list_runs(_store(context, store), as_json=json))


@app.command()
def show(context: typer.Context, run: RunId, store: Store = None, json: Json = False) -> int:
    """Show how a run ended, or where it stands."""
    from perdure.cli.looking import show_run

    return _done(show_run(_store(context, store), run, as_json=json))


@app.command()
def history(context: typer.Context, run: RunId, store: Store = None, json: Json = False) -> int:
    """Print a run's events, one a line."""
    from perdure.cli.looking import print_history

    return _done(print_history(_store(context, store), run, as_json=json))


@app.command()
def watch(
    context: typer.Context,
    run: RunId,
    first: Annotated[
        int, typer.Option("--from", metavar="SEQ", help="Print from that event on, 0 being the first.")
    ] = 0,
    store: Store = None,
    json: Json = False,
) -> int:
    """Print a run's events as they are recorded, until it ends.

    Leave with Ctrl-C and rejoin with --from.
    """
    from perdure.cli.watching import watch_run

    return _done(watch_run(_store(context, store), run, from_seq=first, as_json=json))


@app.command()
def replay(
    context: typer.Context,
    run: RunId,
    last: Annotated[
        int | None,
        typer.Option("--to", metavar="SEQ", help="As of that event, 0 being the first; default: the last one."),
    ] = None,
    store: Store = None,
    json: Json = False,
) -> int:
    """Show what a run looked like at an event.

    It is read from the record alone; nothing is called.
    """
    from perdure.cli.looking import replay_run

    return _done(replay_run(_store(context, store), run, to_seq=last, as_json=json))


@app.command()
def resolve(
    context: typer.Context,
    run: RunId,
    call: Annotated[str, typer.Argument(metavar="CALL", help="The call in doubt, as `show` names it.")],
    happened: Annotated[
        str | None, typer.Option("--happened", metavar="JSON", help="It happened, with this result.")
    ] = None,
    did_not_happen: Annotated[
        bool, typer.Option("--did-not-happen", help="It did not happen and can no longer: it is done again.")
    ] = False,
    failed: Annotated[str | None, typer.Option("--failed", metavar="TEXT", help="It failed, as this says.")] = None,
    by: By = None,
    resume: Resume = False,
    store: Store = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Record what became of a write in doubt.

    That is one that may or may not have happened, and that the run waits for.
    """
    from perdure.cli import settling

    what = settling.Settling(_store(context, store), run, by, resume, json, verbose)
    return _done(settling.resolve(what, call, happened, did_not_happen, failed))


@app.command()
def limit(
    context: typer.Context,
    run: RunId,
    changes: Annotated[
        list[str], typer.Argument(metavar="NAME=TOTAL...", help="As max_model_turns=15; =+5 adds to the present total.")
    ],
    by: By = None,
    resume: Resume = False,
    store: Store = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Set new totals for a run's limits."""
    from perdure.cli import settling

    what = settling.Settling(_store(context, store), run, by, resume, json, verbose)
    return _done(settling.limit(what, changes))


# An answer may be a negative number, which looks like an option.
@app.command(context_settings={"ignore_unknown_options": True})
def answer(
    context: typer.Context,
    run: RunId,
    id: Annotated[str, typer.Argument(metavar="ID", help="The call that waits, as `show` names it.")],
    value: Annotated[str, typer.Argument(metavar="JSON", help="The answer.")],
    by: By = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="IDEMPOTENCY_KEY", help="Recorded with the answer.")
    ] = None,
    resume: Resume = False,
    store: Store = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Answer what a run waits for."""
    from perdure.cli import settling

    what = settling.Settling(_store(context, store), run, by, resume, json, verbose)
    return _done(settling.answer(what, id, value, key))


@app.command()
def cancel(
    context: typer.Context,
    run: RunId,
    reason: Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Recorded.")] = None,
    by: By = None,
    resume: Resume = False,
    store: Store = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """End a run as cancelled."""
    from perdure.cli import settling

    what = settling.Settling(_store(context, store), run, by, resume, json, verbose)
    return _done(settling.cancel(what, reason))


@app.command()
def abandon(context: typer.Context, run: RunId, by: By = None, store: Store = None, json: Json = False) -> int:
    """Give a run up, whatever it waits for.

    It ends and claims no answer.
    """
    from perdure.cli import settling

    what = settling.Settling(_store(context, store), run, by, resume=False, as_json=json, verbose=False)
    return _done(settling.abandon(what))


@app.command()
def verify(
    context: typer.Context,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="One run; default: the whole store.")] = None,
    head: Annotated[
        str | None,
        typer.Option("--head", metavar="HEX", help="A head kept elsewhere: proves that nothing was cut off."),
    ] = None,
    store: Store = None,
    json: Json = False,
) -> int:
    """Prove that no recorded event was changed, lost or moved."""
    from perdure.cli.looking import verify_store

    return _done(verify_store(_store(context, store), run, head=head, as_json=json))


@app.command()
def doctor(context: typer.Context, store: Store = None, json: Json = False) -> int:
    """Look at what Perdure stands on here.

    That is SQLite, locks, disk, store, extras and keys (by name only).
    """
    from perdure.cli.doctor import examine

    return _done(examine(_store(context, store), as_json=json))


@app.command("crash-test")
def crash_test(
    context: typer.Context,
    subject: Annotated[str, typer.Argument(metavar="AGENT_OR_RUN", help="file.toml, module:attribute, or a run's id.")],
    input: Annotated[
        str | None, typer.Option("--input", metavar="TEXT", help="The task, for an agent; @FILE takes it from a file.")
    ] = None,
    input_json: Annotated[str | None, typer.Option("--input-json", metavar="JSON", help="The task as JSON.")] = None,
    agent: Ref = None,
    model: Model = None,
    world: Annotated[
        str | None,
        typer.Option(
            "--world", metavar="REF", help="module:attribute with reset() and effects(): what the tools change."
        ),
    ] = None,
    files: Annotated[
        str | None, typer.Option("--files", metavar="DIR", help="What each drive's working directory begins with.")
    ] = None,
    keep: Annotated[
        str | None, typer.Option("--keep", metavar="DIR", help="Keep stores and notes of cuts that show something.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="S", help="Longest time for one drive.")] = 60.0,
    store: Store = None,
    json: Json = False,
) -> int:
    """Kill a run at every boundary and resume it.

    Says per tool what was doubled, lost or left in doubt.
    """
    from perdure.cli import crash_testing

    task = crash_testing.task_of(subject, input, input_json)
    options = crash_testing.Options(_store(context, store), subject, task, agent, model, world, files, keep, timeout)
    return crash_testing.crash_test(options, as_json=json)


@app.command()
def demo(
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Start service and model in the background and print `export` lines.")
    ] = False,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="What the world is drawn from.")] = None,
    scenario: Annotated[
        str,
        typer.Option(
            "--scenario", metavar="NAME", help="transient, permanent, completed, hostile, unlisted or persistent."
        ),
    ] = "transient",
    model: Model = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="The control: no idempotency key, so the crash costs a second effect.")
    ] = False,
) -> int:
    """Watch an agent be killed at the worst moment, and resume.

    It recovers a failed job.
    """
    from perdure.examples.job_recovery.demo import DemoOptions, run_demo

    return run_demo(DemoOptions(json=json, serve=serve, seed=seed, scenario=scenario, model=model, no_key=no_key))
