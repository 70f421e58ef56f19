"""URLs of stores, and where a store may lie."""

from pathlib import Path

import pytest

from perdure.clock import SystemClock, SystemEntropy
from perdure.errors import ConfigurationError, UnknownError
from perdure.stores.mounts import network_type
from perdure.stores.sqlite import SqliteStore
from perdure.stores.url import open_store, parse_sqlite_url
from perdure.stores.verify import verify

MOUNTS = r"""21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
22 21 0:5 / /home/ann/my\040share rw,relatime - nfs4 server:/ann rw
23 21 0:6 / /mnt/far rw - fuse.sshfs host: rw
24 23 8:2 / /mnt/far/near rw shared:2 master:3 - xfs /dev/sdb1 rw
25 21 0:7 / /data rw - cifs //server/data rw
26 25 8:3 / /data rw - ext4 /dev/sdc1 rw
"""


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("sqlite:perdure.db", ("perdure.db", False)),
        ("sqlite:./perdure.db", ("./perdure.db", False)),
        ("sqlite:/var/lib/perdure.db", ("/var/lib/perdure.db", False)),
        ("sqlite:a b.db?force_network=1", ("a b.db", True)),
        ("sqlite:x.db?force_network=0", ("x.db", False)),
    ],
)
def test_a_url_names_a_path(url: str, parsed: tuple[str, bool]) -> None:
    assert parse_sqlite_url(url) == parsed


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("perdure.db", "no scheme"),
        ("postgres:x", "the scheme 'postgres' .known: sqlite."),
        ("postgresql://host/db", "the scheme 'postgresql'"),
        ("sqlite:", "no file name"),
        ("sqlite::memory:", "a store is a file"),
        ("sqlite:///tmp/x.db", "two slashes"),
        ("sqlite:x.db?cache=shared", "known: force_network=1"),
        ("sqlite:x.db?force_network=yes", "known: force_network=1"),
        ("sqlite:x.db?", "known: force_network=1"),
    ],
)
async def test_a_url_of_another_form_is_refused_with_the_form_that_is_known(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        await open_store(url, clock=SystemClock(), entropy=SystemEntropy())
    assert url in str(caught.value)
    assert "write sqlite:PATH" in str(caught.value)


async def test_a_url_opens_the_store_it_names(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/store.db"
    with pytest.raises(UnknownError):
        await open_store(url, clock=SystemClock(), entropy=SystemEntropy(), create=False)
    store = await open_store(url, clock=SystemClock(), entropy=SystemEntropy())
    assert isinstance(store, SqliteStore)
    await store.close()
    assert (tmp_path / "store.db").exists()


NO_FILE = {
    "/": "the path names no file",
    "/..": "the path names no file",
    "{folder}/loop.db": "lead in a circle",
    "{folder}/loop.db/x.db": "lead in a circle",
    "{folder}/there.db": "lead in a circle",
    "{folder}/zero\0.db": "a zero byte",
}


@pytest.mark.parametrize(("path", "says"), NO_FILE.items(), ids=repr)
async def test_a_path_that_names_no_file_whatever_is_on_the_disk_is_a_configuration_error(
    path: str, says: str, tmp_path: Path
) -> None:
    """C16. By whichever way a store is opened or proven."""
    (tmp_path / "loop.db").symlink_to("loop.db")
    (tmp_path / "there.db").symlink_to("back.db")
    (tmp_path / "back.db").symlink_to("there.db")
    named, before = path.format(folder=tmp_path), sorted(tmp_path.iterdir())
    for opened in (
        open_store(f"sqlite:{named}", clock=SystemClock(), entropy=SystemEntropy()),
        open_store(f"sqlite:{named}", clock=SystemClock(), entropy=SystemEntropy(), read_only=True, create=False),
        SqliteStore.open(named, clock=SystemClock(), entropy=SystemEntropy()),
        verify(named),
    ):
        with pytest.raises(ConfigurationError, match=says) as caught:
            await opened
        assert repr(named) in caught.value.where
        assert caught.value.next
    assert sorted(tmp_path.iterdir()) == before


async def test_links_that_end_at_a_file_name_it_and_all_its_files_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "one.db").symlink_to("two.db")
    (tmp_path / "two.db").symlink_to("far/store.db")
    store = await open_store(f"sqlite:{tmp_path}/one.db", clock=SystemClock(), entropy=SystemEntropy())
    await store.close()
    assert (tmp_path / "far" / "store.db").is_file()
    assert (tmp_path / "far" / "store.db.drivers").is_dir()
    assert not (tmp_path / "one.db.drivers").exists()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/ann/store.db", None),
        ("/home/ann/my share/store.db", "nfs4"),
        ("/mnt/far/store.db", "fuse.sshfs"),
        ("/mnt/far/near/deep/store.db", None),
        ("/mnt/farther/store.db", None),
        ("/data/store.db", None),
    ],
)
def test_network_file_systems_are_told_by_the_innermost_mount(tmp_path: Path, path: str, kind: str | None) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert network_type(Path(path), mounts) == kind


def test_a_system_that_does_not_tell_its_mounts_is_taken_as_local(tmp_path: Path) -> None:
    assert network_type(Path("/x"), tmp_path / "none") is None
