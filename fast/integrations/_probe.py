"""Running a module that others wrote, on random tensors, to see what it computes."""

import warnings

import torch
from torch import Tensor, nn

DTYPES = (torch.bfloat16, torch.float32)  # the narrowest and the widest that the kernels take


def run(probe: nn.Module, x: Tensor) -> object:
    """What the forward of the probe's class returns for x: without its hooks, and with the global random state untouched."""
    devices = [x.device] if x.is_cuda else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices),
        torch.autocast(x.device.type, enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # torch.nn.RMSNorm warns of mixed dtypes
        return type(probe).forward(probe, x.clone())


def failure(error: Exception, given: str, x: Tensor) -> str:
    """The reason for the report where a foreign forward raised."""
    said = (str(error).splitlines() or [""])[0]
    return f"does not run on {given} of shape {list(x.shape)}: {type(error).__name__}: {said}"
