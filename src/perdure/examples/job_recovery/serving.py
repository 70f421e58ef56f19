"""The stage kept standing in the background, for runs by hand.

    python -m perdure.examples.job_recovery.serving --folder DIR --seed N --scenario NAME --hold SECONDS

Prints one line of JSON, the environment a run needs, and closes its standard output. Ending this process, by whatever
signal, ends both servers; on SIGTERM and SIGINT it removes the folder as well when told `--remove`.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from perdure.examples.job_recovery.stage import DemoError, end_process, read_line, set_stage

_START_TIMEOUT_S = 60.0


def serve(seed: int, scenario: str, *, hold_s: float, no_key: bool, folder: Path | None) -> str:
    """Starts the stage in the background and returns shell text of `export` lines; PERDURE_DEMO_PID names the process
    whose end ends all of it.

    Raises:
        DemoError: it did not start.
    """
    place = Path(tempfile.mkdtemp(prefix="perdure-demo-")) if folder is None else folder
    argv = [sys.executable, "-m", __name__, "--folder", str(place), "--seed", str(seed), "--scenario", scenario]
    argv += ["--hold", str(hold_s)] + (["--remove"] if folder is None else [])
    log = place / "serving.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    assert process.stdout is not None
    with process.stdout as stream:
        line = read_line(stream, _START_TIMEOUT_S)
    try:
        names: dict[str, str] = json.loads(line)
    except ValueError:
        end_process(process)
        raise DemoError(f"the servers did not start: {log.read_text()[-2000:].strip()}", where=str(log)) from None
    process.returncode = 0  # it goes on without us; tells Popen not to complain about that
    names |= {"PERDURE_DEMO_NO_KEY": "1"} if no_key else {}
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in names.items())


def main() -> None:
    """Keeps the stage standing until it is told to end, or until a server has ended."""
    parser = argparse.ArgumentParser(description="The demo's servers, in the background.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--scenario", required=True)
    parser.add_argument("--hold", type=float, required=True)
    parser.add_argument("--remove", action="store_true")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with set_stage(options.folder, options.seed, options.scenario, stand_in=True, hold_s=options.hold) as stage:
            print(json.dumps(stage.exports() | {"PERDURE_DEMO_PID": str(os.getpid())}), flush=True)
            # Whoever reads our output waits for its end, a shell's $(...) above all.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            os.wait()
    except KeyboardInterrupt:
        return
    finally:
        if options.remove:
            shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
