"""Whether a tensor may be written over, because nobody else can look at it any more."""

import sys

import torch
from torch import Tensor

_control = [object()]
_ALONE = sys.getrefcount(_control[0])  # of what one list holds; it differs between versions of Python


def held_alone(tensors: list[Tensor]) -> bool:
    """Whether this list has the only reference to each of its tensors and to their memory, from Python and from C++."""
    return all(
        sys.getrefcount(tensors[i]) == _ALONE
        and tensors[i]._use_count() == 1
        and torch._C._storage_Use_Count(tensors[i].untyped_storage()._cdata)
        == 2  # the second is untyped_storage()'s
        for i in range(len(tensors))
    )
