"""Runs a module as a program that ends with its parent: when the parent's end of standard input closes, for whatever
reason, SIGKILL included, the process leaves at once. So no server of the demo outlives it.

    python -m perdure.examples.job_recovery.tether MODULE [ARGUMENT ...]
"""

import os
import runpy
import sys
import threading


def _leave_with_parent() -> None:
    while os.read(0, 4096):
        continue
    os._exit(0)


def main() -> None:
    """Runs the module named by the first argument with the rest as its arguments."""
    module, *arguments = sys.argv[1:]
    threading.Thread(target=_leave_with_parent, daemon=True, name="tether").start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
