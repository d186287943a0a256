"""How many bytes a process could still take on a device: of the machine, of its container, and of its own limits."""

import ctypes
import gc
import os
from pathlib import Path

import torch


def free_bytes(device: torch.device | None = None) -> int:
    """Return the bytes that are free on a device, the CPU where none is given."""
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, min([_machine(), *_container(), *_limits()]))


def give_back() -> None:
    """Return to the system what the process has freed: an allocator keeps some of it, and it looks taken."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # not glibc
        return


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had; on a CPU torch raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _machine() -> int:
    available = _field(Path("/proc/meminfo"), "MemAvailable:")
    if available is not None:
        return available * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # no Linux


def _container() -> list[int]:
    """Return what the control group (version 2) leaves; files that the kernel keeps in memory are given back."""
    try:
        path = Path("/proc/self/cgroup").read_text(encoding="ascii").strip().removeprefix("0::").lstrip("/")
        group = Path("/sys/fs/cgroup") / path
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return []
    return [limit - used + (_field(group / "memory.stat", "file") or 0)]


def _limits() -> list[int]:
    try:
        import resource
    except ImportError:  # no Unix
        return []
    found = []
    for limit, used in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            found.append(soft - (_field(Path("/proc/self/status"), used) or 0) * 1024)
    return found


def _field(path: Path, name: str) -> int | None:
    """Return the number of a line `NAME NUMBER ...` of a file of the kernel's."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
