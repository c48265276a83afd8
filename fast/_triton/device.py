"""Facts about the device that a tensor lives on, asked once."""

from functools import lru_cache

import torch


@lru_cache
def arch(device: torch.device) -> int:
    """Compute capability as one number (90 on an H200). The interpreter stands in for the newest tuned one."""
    if device.type == "cpu":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors; 4 in the interpreter, so that small inputs still spread over several programs."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
