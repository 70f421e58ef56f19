"""The command line of the benchmark: what it refuses, what it runs, what it leaves."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from bench.disk import UnfitPlaceError, file_system, place

ROOT = Path(__file__).resolve().parents[2]
MEMORY = Path("/dev/shm")
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
"""An installer that finds nothing, wherever it is."""


def begin(*arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "bench.run", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | variables,
    )


def bench(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    with begin(*arguments, **variables) as started:
        out, err = started.communicate()
    return subprocess.CompletedProcess(started.args, started.returncode, out, err)


@pytest.mark.skipif(not MEMORY.is_dir() or file_system(MEMORY) != "tmpfs", reason="no tmpfs to refuse here")
def test_a_file_system_in_memory_is_refused(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        done = bench("--dir", folder, "--rounds", "1", "--turns", "5,6", "--json", tmp_path / "report.json")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{folder} lies on tmpfs" in done.stderr
        assert [*Path(folder).iterdir(), *tmp_path.iterdir()] == []


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnfitPlaceError, match="is no folder"):
        place(tmp_path / "none")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--turns", "10", "not two or more ascending numbers"),
        ("--turns", "20,10", "not two or more ascending numbers"),
        ("--turns", "0,10", "not a whole number of at least 1"),
        ("--turns", "ten,20", "not a whole number of at least 1"),
        ("--rounds", "0", "not a whole number of at least 1"),
        ("--rounds", "2.5", "not a whole number of at least 1"),
        ("--only", "w1,w4", "'w4' is no workload; there are w1, w2, w3, startup, peers"),
        ("--only", "", "'' is no workload"),
        ("--json", "none/report.json", "its folder does not exist"),
        ("--json", "/", "it is a folder"),
        ("--out", "/dev/null/results", "/dev/null is not a folder"),
        ("--environments", "/dev/null", "/dev/null is not a folder"),
    ],
)
def test_a_bad_option_is_said_in_words_before_anything_is_measured(option: str, value: str, said: str) -> None:
    done = bench(option, value)
    assert (done.returncode, done.stdout) == (2, "")
    assert option in done.stderr
    assert said in done.stderr


@pytest.mark.slow
def test_the_benchmark_runs_and_leaves_nothing_behind_but_its_curves(tmp_path: Path) -> None:
    """All workloads, with the peers and the library for curves not to be had: both are named, and the rest goes on."""
    with tempfile.TemporaryDirectory(dir=place(None)) as folder:
        done = bench(
            *("--quick", "--rounds", "1", "--json", "-", "--dir", folder, "--out", tmp_path / "new" / "out"),
            *("--environments", tmp_path / "environments"),
            **NO_INDEX,
        )
        assert list(Path(folder).iterdir()) == []
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"w1", "w2", "w3", "startup", "peers"} < report.keys()
    assert {target["verdict"] for target in report["targets"]} == {"not judged"}
    reasons = {one["name"]: one["not_measured"] for one in report["peers"]["contestants"]}
    assert reasons.pop("perdure") is None
    assert len(reasons) == 5
    assert all("could not install" in reason for reason in reasons.values())
    assert "no PNG: could not install" in done.stderr
    assert [file.name for file in (tmp_path / "new" / "out").iterdir()] == ["curves.txt"]


@pytest.mark.slow
def test_only_the_workloads_asked_for_are_measured_and_a_missed_target_is_told_by_the_exit(tmp_path: Path) -> None:
    arguments = ("--only", "w1", "--rounds", "1", "--turns", "5,6", "--no-strace", "--out", tmp_path)
    done = bench(*arguments, "--json", tmp_path / "report.json", "--strict", **NO_INDEX)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report.keys() & {"w1", "w2", "w3", "startup", "peers"} == {"w1"}
    assert report["w1"]["syncs_per_turn"] is None
    assert "W1 syncs a turn" in done.stdout
    assert done.returncode == (1 if any(target["verdict"] == "miss" for target in report["targets"]) else 0)


@pytest.mark.slow
def test_one_that_is_interrupted_ends_what_it_was_measuring_and_leaves_nothing(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place(None)) as folder:
        arguments = ("--only", "w1", "--turns", "500000,1000000", "--dir", folder, "--out", tmp_path)
        with begin(*arguments) as started:
            try:
                deadline = time.monotonic() + 60
                while not commands_with(folder, "measured.w1"):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                started.send_signal(signal.SIGINT)
                started.communicate(timeout=60)
            finally:
                started.kill()
        assert started.returncode == 130
        assert commands_with(folder) == []
        assert list(Path(folder).iterdir()) == []


def commands_with(*words: str) -> list[str]:
    """Command lines of processes that have all these words in them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            command = entry.read_bytes().decode(errors="replace")
            if all(word in command for word in words):
                found.append(command)
    return found


@pytest.mark.bench
def test_a_turn_costs_no_more_than_was_promised(tmp_path: Path) -> None:
    """The whole benchmark with its real sizes."""
    done = bench("--strict", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
