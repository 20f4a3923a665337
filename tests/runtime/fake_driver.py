"""A device for tests of host memory where there is none."""

import threading

from hsa_compile.runtime import host_os
from hsa_compile.runtime.host_os import PAGE


class FakeDriver:
    """A device that pins up to ``limit`` bytes, at most ``largest`` at once; streams that finish when told to."""

    def __init__(self, limit: int = 1 << 40, largest: int = 1 << 40, crosses: bool = True) -> None:
        self.node = None
        self.limit, self.largest, self.crosses = limit, largest, crosses
        self.managed_works = True
        self.registered: dict[int, int] = {}
        self.managed: dict[int, int] = {}
        self.attempts: list[int] = []
        self.busy: set[str] = set()
        self.capturing = False
        self.recorded: list[str] = []
        self._lock = threading.Lock()

    def register(self, address: int, nbytes: int) -> str | None:
        with self._lock:
            self.attempts.append(nbytes)
            assert address % PAGE == 0
            for start, size in self.registered.items():
                assert address + nbytes <= start or start + size <= address, "registered twice"
            if nbytes > self.largest or sum(self.registered.values()) + nbytes > self.limit:
                return "out of memory"
            self.registered[address] = nbytes
            return None

    def unregister(self, address: int) -> None:
        with self._lock:
            del self.registered[address]

    def allocate_managed(self, nbytes: int) -> tuple[int, str | None]:
        if not self.managed_works:
            return 0, "not supported"
        address = host_os.map_memory(nbytes, huge_pages=False)
        self.managed[address] = nbytes
        return address, None

    def free_managed(self, address: int) -> None:
        host_os.unmap(address, self.managed.pop(address))

    def copies_cross_registrations(self) -> bool:
        return self.crosses

    def current_stream(self) -> str:
        return "main"

    def record(self, streams) -> list[str] | None:
        if self.capturing:
            return None
        self.recorded.extend(streams)
        return list(streams)

    def done(self, event: str) -> bool:
        return event not in self.busy

    @property
    def pinned(self) -> int:
        return sum(self.registered.values())
