import os, signal
from contextlib import contextmanager
import apsw


class KillAtSync:
    def __init__(self, n, *, after=False):
        self.n, self.after = n, after
        self.c = 0


@contextmanager
def tapped(tap):
    class F(apsw.VFSFile):
        def __init__(self, name, flags):
            super().__init__("unix", name, flags)

        def xSync(self, flags):
            tap.c += 1
            if tap.c == tap.n and not tap.after:
                os.kill(os.getpid(), signal.SIGKILL)
            super().xSync(flags)
            if tap.c == tap.n:
                os.kill(os.getpid(), signal.SIGKILL)

    class V(apsw.VFS):
        def __init__(self):
            super().__init__("tapped", "unix", makedefault=True)

        def xOpen(self, name, flags):
            return F(name, flags)

    v = V()
    yield
    v.unregister()
