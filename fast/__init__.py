"""The Triton versions. Same names and signatures as `reference`; importing needs no GPU."""

from fast.chunked_cross_entropy import CrossEntropyStats, chunked_cross_entropy, cross_entropy
from fast.lora_linear import Adapter, lora_linear, lora_qkv, lora_swiglu_mlp
from fast.quantized_weights import FakeQuantWeight, NF4Weight, fake_quantize
from fast.rms_norm import rms_norm
from fast.swiglu import swiglu, swiglu_mlp

__all__ = [
    "Adapter",
    "CrossEntropyStats",
    "FakeQuantWeight",
    "NF4Weight",
    "chunked_cross_entropy",
    "cross_entropy",
    "fake_quantize",
    "lora_linear",
    "lora_qkv",
    "lora_swiglu_mlp",
    "rms_norm",
    "swiglu",
    "swiglu_mlp",
]
