"""Implementations by name: this project's, the reference, well-known packages, or anybody's `package.module:function`."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from equivalence_tests.harness.interpreter import interpreting
from equivalence_tests.harness.operations import Operation
from equivalence_tests.harness.oracle import Unsupported
from equivalence_tests.harness.usage import UsageError


def implementation(name: str, operation: Operation) -> Callable:
    """The function that `name` stands for on the command line; raises UsageError where there is none."""
    if name == "fast":
        return getattr(importlib.import_module("fast"), operation.function)
    if name == "reference":
        return hand_derived(operation)
    if name in PEERS:
        package, functions = PEERS[name]
        if operation.function not in functions:
            raise UsageError(f"--impl {name} has no {operation.function}; it has: {', '.join(functions)}")
        _import(name, package)
        return functions[operation.function]
    module, colon, attribute = name.partition(":")
    if not colon and "." not in name:
        raise UsageError(f"--impl must be one of {', '.join(NAMES)} or package.module:function, got {name!r}")
    found = _import(name, module)
    for part in (attribute or operation.function).split("."):
        if not hasattr(found, part):
            raise UsageError(f"--impl {name}: {module} has no {attribute or operation.function}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"--impl {name}: {found!r} is not callable")
    return found


def _import(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever a stranger's module raises while it is imported
        raise UsageError(
            f"--impl {name}: {module} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def hand_derived(operation: Operation) -> Callable:
    """The reference in the working dtype, with the gradients of its own <function>_backward: right by the contract, which
    autograd of the reference is not always, because it rounds gradients wherever the forward pass rounds values."""
    tensors = [a.name for a in operation.tensors]

    class HandDerived(Function):
        @staticmethod
        def forward(ctx: Any, options: dict[str, Any], *given: Tensor | None) -> Any:
            ctx.options = options
            ctx.save_for_backward(*given)
            args, kwargs = operation.split({**options, **dict(zip(tensors, given, strict=True))})
            return operation.definition(*args, **kwargs)

        @staticmethod
        def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
            values = {**ctx.options, **dict(zip(tensors, ctx.saved_tensors, strict=True))}
            args, kwargs = operation.split(values)
            grads = operation.backward(cotangents, *args, **kwargs)
            asked = zip(tensors, ctx.needs_input_grad[1:], strict=True)
            return None, *(grads.get(name) if needed else None for name, needed in asked)

    def function(*args: Any, **kwargs: Any) -> Any:
        values = operation.bind(args, kwargs)
        given = [values.pop(name) for name in tensors]
        return HandDerived.apply(values, *given)

    return function


def _refuse(**given: Tensor | None) -> None:
    """Raise Unsupported for the first tensor that is given."""
    for name, tensor in given.items():
        if tensor is not None:
            raise Unsupported(f"a {name}")


@triton.jit
def _rsqrt(x):
    return tl.rsqrt(x)


def _torch_rms_norm(
    x, weight=None, *, bias=None, residual=None, eps=1e-6, weight_offset=0.0, casting="llama"
):
    _refuse(bias=bias, residual=residual)
    if weight_offset:
        raise Unsupported("a weight_offset")
    if casting != "gemma":
        raise Unsupported('casting="llama"')
    if weight is not None and weight.dtype != x.dtype:
        raise Unsupported("a weight of another dtype than x")
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def _liger_rms_norm(
    x, weight=None, *, bias=None, residual=None, eps=1e-6, weight_offset=0.0, casting="llama"
):
    from liger_kernel.ops import rms_norm as liger

    _refuse(bias=bias, residual=residual)
    if weight is None:
        raise Unsupported("no weight")
    if interpreting():
        liger.rsqrt = _rsqrt  # theirs is libdevice's, which the interpreter lacks
    return liger.LigerRMSNormFunction.apply(x, weight, eps, weight_offset, casting, False)


def _transformers_rms_norm(
    x, weight=None, *, bias=None, residual=None, eps=1e-6, weight_offset=0.0, casting="llama"
):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    _refuse(bias=bias, residual=residual)
    if weight is None:
        raise Unsupported("no weight")
    if weight_offset != (0.0 if casting == "llama" else 1.0):
        raise Unsupported(f"casting={casting!r} with weight_offset={weight_offset}")
    module = LlamaRMSNorm(1, eps) if casting == "llama" else GemmaRMSNorm(1, eps)
    return torch.func.functional_call(module, {"weight": weight}, (x,))


_ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda gate: functional.relu(gate).square(),
}


def _plain(alpha: float, limit: float | None, up_offset: float) -> None:
    if alpha != 1.0 or limit is not None or up_offset:
        raise Unsupported("alpha, a limit or an up_offset")


def _torch_swiglu(gate, up, *, activation="silu", alpha=1.0, limit=None, up_offset=0.0):
    _plain(alpha, limit, up_offset)
    return _ACTIVATIONS[activation](gate) * up


def _torch_swiglu_mlp(
    x, w_gate, w_up, w_down, *, b_gate=None, b_up=None, b_down=None,
    activation="silu", alpha=1.0, limit=None, up_offset=0.0, recompute=False,
):  # fmt: skip
    _plain(alpha, limit, up_offset)
    if recompute:
        raise Unsupported("recompute")
    gate, up = functional.linear(x, w_gate, b_gate), functional.linear(x, w_up, b_up)
    return functional.linear(_ACTIVATIONS[activation](gate) * up, w_down, b_down)


def _liger_swiglu(gate, up, *, activation="silu", alpha=1.0, limit=None, up_offset=0.0):
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    _plain(alpha, limit, up_offset)
    if activation != "silu":
        raise Unsupported(f"activation={activation!r}")
    if gate.dtype != up.dtype:
        raise Unsupported("gate and up of two dtypes")
    return LigerSiLUMulFunction.apply(gate, up)


# name → the package it needs, and its functions, each with the reference's signature.
PEERS: dict[str, tuple[str, dict[str, Callable]]] = {
    "torch": (
        "torch",
        {"rms_norm": _torch_rms_norm, "swiglu": _torch_swiglu, "swiglu_mlp": _torch_swiglu_mlp},
    ),
    "liger": ("liger_kernel.ops", {"rms_norm": _liger_rms_norm, "swiglu": _liger_swiglu}),
    "transformers": ("transformers", {"rms_norm": _transformers_rms_norm}),
}
NAMES = ("fast", "reference", *PEERS)
