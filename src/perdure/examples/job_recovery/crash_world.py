"""What `perdure crash-test` needs to know of the job service: how it is made new, and what was done to it.

For a stage that stands in the background (`eval "$(perdure demo --serve)"`), which the environment names.
"""

import os
from pathlib import Path

from perdure.errors import ConfigurationError
from perdure.examples.job_recovery.jobs import Jobs
from perdure.examples.job_recovery.world import draw_world


class JobService:
    """The world of the job-recovery agent: retries of jobs, over all jobs."""

    def __init__(self) -> None:
        """Reads the environment.

        Raises:
            ConfigurationError: no stage is named there.
        """
        try:
            self._folder = Path(os.environ["PERDURE_DEMO_FOLDER"])
            self._drawn = draw_world(int(os.environ["PERDURE_DEMO_SEED"]), os.environ["PERDURE_DEMO_SCENARIO"])
        except KeyError as error:
            raise ConfigurationError(
                f"{error.args[0]} is not set", where="the job service", next='run: eval "$(perdure demo --serve)"'
            ) from None

    def reset(self) -> None:
        """Makes the service's file new, and has it hold no answer back."""
        for switch in (self._folder / "switches").iterdir():
            switch.unlink()
        Jobs(self._folder / "service.db").reset(self._drawn)

    def effects(self) -> list[str]:
        """The jobs that were retried, each as often as it was."""
        return Jobs(self._folder / "service.db").effects()
