"""The Triton versions. Same names and signatures as `reference`; importing needs no GPU."""

from fast.rms_norm import rms_norm
from fast.swiglu import swiglu, swiglu_mlp

__all__ = ["rms_norm", "swiglu", "swiglu_mlp"]
