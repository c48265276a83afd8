"""Facts about the device that a tensor lives on, asked once."""

from functools import lru_cache

import torch
import triton

# A constant, because torch.compile cannot trace the look-up.
_INTERPRETED = bool(triton.knobs.runtime.interpret)


@lru_cache
def arch(device: torch.device) -> int:
    """Compute capability as one number (90 on an H200). The interpreter stands in for an H200."""
    if device.type == "cpu":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors; 4 in the interpreter, so that small inputs still spread over several programs."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have, from the CUDA programming guide's table of compute capabilities."""
    return {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448}.get(arch(device), 101376)


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1 before triton was imported); it does not know Gluon."""
    return _INTERPRETED
