"""Which kind of file system a path lies on. SQLite's shared memory and OS locks do not hold across machines."""

from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")

NETWORK_TYPES = frozenset(
    {
        *(
            "9p",
            "afs",
            "autofs",
            "beegfs",
            "ceph",
            "cifs",
            "coda",
            "davfs",
            "glusterfs",
            "gpfs",
            "lustre",
            "ncpfs",
            "nfs",
            "nfs4",
        ),
        *("ocfs2", "orangefs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf"),
        *("fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
    }
)


def network_type(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The type of the network file system that the path lies on; None when it lies on a local one, or where the
    system does not tell (no `/proc`)."""
    kind = mounted_type(path, mounts)
    return kind if kind in NETWORK_TYPES else None


def mounted_type(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The type of the file system that the path lies on; None where the system does not tell."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    best, kind = -1, None
    for line in lines:
        left, _, right = line.partition(" - ")
        mount_point = Path(_unescaped(left.split(" ")[4]))
        # At equal depth the later line is mounted over the earlier one.
        if len(mount_point.parts) >= best and (path == mount_point or mount_point in path.parents):
            best, kind = len(mount_point.parts), right.split(" ")[0]
    return kind


def _unescaped(text: str) -> str:
    """The kernel writes space, tab, newline and backslash as octal."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text
