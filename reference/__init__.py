"""Readable PyTorch definitions of every operation. `__all__` is the list of operations; `fast` has the same names."""

from reference.rms_norm import rms_norm
from reference.swiglu import swiglu, swiglu_mlp

__all__ = ["rms_norm", "swiglu", "swiglu_mlp"]
