"""What codes stand for: the 16 values of NF4 and the 256 of the signed dynamic map that scales are quantised with."""

import torch
from torch import Tensor

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
MAP_BLOCK = 256  # scales that share one of their own
SMALLEST = 1e-38  # no block is divided by less; so a block of zeros stays 0


def nf4_table(device: torch.device) -> Tensor:
    """fp32 [16], ascending: quantiles of a normal distribution, half of them on either side of 0."""
    return torch.tensor(NF4, dtype=torch.float32, device=device)


def dynamic_map(device: torch.device) -> Tensor:
    """fp32 [256], ascending: for e = 0 … 6 the middles of 2^e equal parts of [0.1, 1], times 10^(e−6), of both signs; 0 and 1.

    Dettmers 2016, https://arxiv.org/abs/1511.04561. Computed on the CPU, where bitsandbytes does, so that the bits are its.
    """
    values = [0.0, 1.0]
    for e in range(7):
        edges = torch.linspace(0.1, 1, 2**e + 1, dtype=torch.float32)
        middles = 10 ** (e - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32).to(device)
