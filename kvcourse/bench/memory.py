"""The most memory that this process has held."""

import sys
from pathlib import Path

import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak(device: torch.device) -> bool:
    """Begin anew: from now on `peak_memory` is the highest since this call. False where the system cannot do that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        FORGET.write_text("5")  # proc(5): resets the peak of the resident set
    except OSError:
        return False
    return True


def peak_memory(device: torch.device) -> int:
    """Bytes: on CUDA of PyTorch's tensors, on the CPU of the whole process (resident: in memory, not merely asked
    for), with Python and its libraries."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():  # not getrusage: there a new process begins with the peak of the one that started it
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
        if "VmHWM" in lines:
            return int(lines["VmHWM"].split()[0]) * 1024
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
