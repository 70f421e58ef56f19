"""The report of requirement ids, over trees made for it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = """# A page
| id | state | requirement |
| --- | --- | --- |
| Z-001 | built | An id of no known letter is no line of the list. |
| S-001 | built | One. |
| S-002 | built | Two. |
| S-003 | built | Three. |
| C9 | built | Nine. |
| C10 | built | Ten. |
| H01 | open | A case. |
"""


def report(tree: Path, *docstrings: str, page: str = PAGE) -> subprocess.CompletedProcess[str]:
    (tree / "docs").mkdir()
    (tree / "docs" / "requirements.md").write_text(page)
    folder = tree / "tests" / "layer"
    folder.mkdir(parents=True)
    tests = [f'def test_{number}() -> None:\n    """{text}"""\n' for number, text in enumerate(docstrings)]
    (folder / "test_things.py").write_text("\n".join(tests))
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "requirements", tree], capture_output=True, text=True, check=False
    )


def test_a_built_id_that_no_test_claims_fails_and_is_named(tmp_path: Path) -> None:
    done = report(tmp_path, "S-001, S-003.", "C9 and C10.")
    assert done.returncode == 1
    assert "claimed by no test (1): S-002" in done.stdout


def test_ranges_and_lists_claim_each_id_and_open_ids_need_no_claim(tmp_path: Path) -> None:
    done = report(tmp_path, "S-001 to S-003, C9 to C10.")
    assert done.returncode == 0, done.stdout
    assert done.stdout == "built: 5 of 5 claimed by tests, open: 0 of 1 claimed by tests\n"


def test_an_id_in_code_or_a_comment_is_no_claim(tmp_path: Path) -> None:
    done = report(tmp_path, "S-001 to S-003, C9.", '"""\n    # C10\n    name = "C10"\n    """')
    assert done.returncode == 1
    assert "(1): C10" in done.stdout


def test_a_claim_of_an_id_that_is_not_listed_fails(tmp_path: Path) -> None:
    done = report(tmp_path, "S-001 to S-003, C9, C10.", "S-004.")
    assert done.returncode == 1
    assert "claims S-004" in done.stdout


def test_a_range_over_two_letters_fails(tmp_path: Path) -> None:
    done = report(tmp_path, "S-001 to S-003, C9, C10.", "S-001 to R-003.")
    assert done.returncode == 1
    assert "must keep its letter" in done.stdout


def test_a_malformed_or_doubled_line_of_the_list_fails(tmp_path: Path) -> None:
    page = PAGE + "| H01 | open | Again. |\n| H02 | done | No such mark. |\n"
    done = report(tmp_path, "S-001 to S-003, C9, C10.", page=page)
    assert done.returncode == 1
    assert "H01 is listed twice" in done.stdout
    assert "requirements.md:12: not `| ID" in done.stdout


def test_an_empty_list_fails(tmp_path: Path) -> None:
    assert report(tmp_path, page="# Nothing\n").returncode == 1
