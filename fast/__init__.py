"""The Triton versions. Same names and signatures as `reference`; importing needs no GPU."""

from fast.rms_norm import rms_norm

__all__ = ["rms_norm"]
