"""Readable PyTorch definitions of every operation. `__all__` is the list of operations; `fast` has the same names."""

from reference.chunked_cross_entropy import CrossEntropyStats, chunked_cross_entropy, cross_entropy
from reference.lora_linear import Adapter, lora_linear, lora_qkv, lora_swiglu_mlp
from reference.quantized_weights import FakeQuantWeight, NF4Weight, fake_quantize
from reference.rms_norm import rms_norm
from reference.swiglu import swiglu, swiglu_mlp

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
