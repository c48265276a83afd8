"""Triton's interpreter (TRITON_INTERPRET=1), corrected: bf16 values that behave as they do on a GPU.

The interpreter keeps bf16 as raw uint16, so its arithmetic on bf16 is integer arithmetic, and its cast from fp32 truncates.
Here a bf16 value is a float32 array whose elements all are bf16 numbers. Triton holds every value in a `TensorHandle`;
rounding to nearest even when a bf16 handle is made therefore rounds after each operation, whatever the operation is.
Only what looks at bits needs more: loads, stores, atomics, bitcasts, casts between formats.
An fp32 sum, difference or product of two bf16 numbers, rounded again to bf16, equals the one rounding of a GPU (24 ≥ 2·8 + 2).
"""

from typing import Any

import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

from equivalence_tests.harness.bf16 import bf16_bits, fma_bf16, from_bf16_bits, round_to_bf16

_ir, _native = triton_interpreter._ir, triton_interpreter._interpreter
_REPLACED = (
    "create_masked_load",
    "create_masked_store",
    "cast_impl",
    "create_fp_to_fp",
    "create_bitcast",
    "create_fabs",
)
_REPLACED += ("create_fma", "create_atomic_rmw", "create_atomic_cas")
_state = {"patched": False, "tested": False}


def interpreting() -> bool:
    """Whether this process interprets its Triton kernels. Fixed when triton is first imported."""
    interpreted = isinstance(tl.cdiv, triton_interpreter.InterpretedFunction)
    if interpreted != bool(triton.knobs.runtime.interpret):
        raise RuntimeError(
            "TRITON_INTERPRET was changed after triton was imported; set it before the process imports triton"
        )
    return interpreted


def correct() -> None:
    """Correct the interpreter of this process and test the correction, once; nothing to do where kernels are compiled.

    Raises RuntimeError if the interpreter of the installed Triton is not right afterwards.
    """
    if not interpreting() or _state["tested"]:
        return
    if not _state["patched"]:
        try:
            _patch()
        except AttributeError as error:
            raise RuntimeError(_complaint([f"its source has changed: {error}"])) from error
        _state["patched"] = True
    self_test()
    _state["tested"] = True


def self_test() -> None:
    """Compare casts and arithmetic with torch, bit for bit; RuntimeError names the Triton version and what disagrees."""
    from equivalence_tests.harness.interpreter_self_test import disagreements

    try:
        wrong = disagreements()
    except Exception as error:  # whatever a changed interpreter does to a test kernel is a failed test
        raise RuntimeError(_complaint([f"a test kernel fails: {error!r}"])) from error
    if wrong:
        raise RuntimeError(_complaint(wrong))


def _complaint(wrong: list[str]) -> str:
    return (
        f"the interpreter of Triton {triton.__version__} (numpy {np.__version__}), as equivalence_tests.harness.interpreter "
        f"corrects it, is not numerically right, and no verdict could be trusted. Wrong: " + "; ".join(wrong)
    )


def _is_bf16(dtype: tl.dtype) -> bool:
    return dtype.scalar.is_bf16()


def _patch() -> None:
    original = {name: getattr(InterpreterBuilder, name) for name in _REPLACED}
    np_dtype, fits = triton_interpreter._get_np_dtype, triton_interpreter._validate_np_data_size
    handle_made, run_grid, patch_tensor = (
        TensorHandle.__post_init__,
        GridExecutor.__call__,
        triton_interpreter._patch_lang_tensor,
    )
    convert = triton_interpreter._implicit_cvt
    reduce_sum, cumsum, cumprod = ReduceOps.sum, ScanOps.cumsum, ScanOps.cumprod

    def make_handle(self: TensorHandle) -> None:
        handle_made(self)
        if _is_bf16(self.dtype):
            kind = np.asarray(self.data).dtype.kind
            if kind == "f":
                self.data = round_to_bf16(self.data)
            elif kind != "b":  # comparisons give bool under their operands' dtype
                raise TypeError(
                    f"a bf16 value of the interpreter is held as {self.data.dtype}, and must be held as float32"
                )

    def masked_load(
        self: InterpreterBuilder,
        ptrs: TensorHandle,
        mask: Any,
        other: TensorHandle | None,
        *policy: Any,
        **kw: Any,
    ):
        if not ptrs.get_element_ty().is_bf16():
            return original["create_masked_load"](self, ptrs, mask, other, *policy, **kw)
        fill = np.zeros(ptrs.data.shape, np.uint16) if other is None else bf16_bits(other.data)
        return TensorHandle(
            from_bf16_bits(_native.load(ptrs.data, mask.data, fill, np.dtype(np.uint16))), tl.bfloat16
        )

    def masked_store(
        self: InterpreterBuilder, ptrs: TensorHandle, value: TensorHandle, mask: Any, *policy: Any, **kw: Any
    ):
        if not ptrs.get_element_ty().is_bf16():
            return original["create_masked_store"](self, ptrs, value, mask, *policy, **kw)
        return _native.store(ptrs.data, bf16_bits(value.data), mask.data)

    def cast(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        if not (_is_bf16(src.dtype) or _is_bf16(dst_type)):
            return original["cast_impl"](self, src, dst_type)
        return TensorHandle(src.data.astype(triton_interpreter._get_np_dtype(dst_type)), dst_type.scalar)

    def fp_to_fp(
        self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype, rounding: Any
    ) -> TensorHandle:
        if _is_bf16(src.dtype):
            wide = TensorHandle(src.data, tl.float32)
            if dst_type.scalar.is_fp16() or dst_type.scalar.is_fp32():
                return cast(self, wide, dst_type)
            return original["create_fp_to_fp"](self, wide, dst_type, rounding)
        if not _is_bf16(dst_type):
            return original["create_fp_to_fp"](self, src, dst_type, rounding)
        if rounding == _ir.ROUNDING_MODE.RTZ and src.dtype.scalar.is_fp32():
            bits = np.ascontiguousarray(src.data).view(np.uint32)
            cut = (bits & np.uint32(0xFFFF0000)).view(np.float32)
            return TensorHandle(np.where(np.isnan(src.data), src.data, cut), tl.bfloat16)
        if rounding == _ir.ROUNDING_MODE.RTZ:
            raise NotImplementedError(
                f"rounding {src.dtype} to bf16 toward zero in the interpreter; go through fp32"
            )
        if not (src.dtype.scalar.is_fp16() or src.dtype.scalar.is_fp32() or src.dtype.scalar.is_fp64()):
            src = original["create_fp_to_fp"](self, src, tl.float32, None)
        return cast(self, src, dst_type)

    def bitcast(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        if _is_bf16(src.dtype) and _is_bf16(dst_type):
            return src
        if _is_bf16(src.dtype):
            return TensorHandle(
                bf16_bits(src.data).view(triton_interpreter._get_np_dtype(dst_type)), dst_type.scalar
            )
        if _is_bf16(dst_type):
            return TensorHandle(from_bf16_bits(src.data.view(np.uint16)), tl.bfloat16)
        return original["create_bitcast"](self, src, dst_type)

    def fabs(self: InterpreterBuilder, arg: TensorHandle) -> TensorHandle:
        return (
            TensorHandle(np.abs(arg.data), tl.bfloat16)
            if _is_bf16(arg.dtype)
            else original["create_fabs"](self, arg)
        )

    def fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if not _is_bf16(z.dtype):
            return original["create_fma"](self, x, y, z)
        return TensorHandle(fma_bf16(x.data, y.data, z.data), tl.bfloat16)

    def atomic_rmw(
        self: InterpreterBuilder, op: Any, ptr: TensorHandle, val: TensorHandle, mask: Any, *order: Any
    ) -> TensorHandle:
        if not ptr.get_element_ty().is_bf16():
            return original["create_atomic_rmw"](self, op, ptr, val, mask, *order)
        if op != _ir.ATOMIC_OP.FADD:
            raise NotImplementedError(
                f"atomic {op} on bf16 in the interpreter; Triton has only atomic_add on bf16"
            )
        old = np.zeros(ptr.data.shape, np.float32)
        # Lanes may meet: one after the other.
        for i in zip(*np.nonzero(np.broadcast_to(mask.data, old.shape)), strict=True):
            where, on = ptr.data[i].reshape(1), np.ones(1, bool)
            old[i] = from_bf16_bits(_native.load(where, on, np.zeros(1, np.uint16), np.dtype(np.uint16)))[0]
            _native.store(where, bf16_bits(round_to_bf16((old[i] + val.data[i]).reshape(1))), on)
        return TensorHandle(old, tl.bfloat16)

    def atomic_cas(
        self: InterpreterBuilder, ptr: TensorHandle, cmp: TensorHandle, val: TensorHandle, *order: Any
    ) -> TensorHandle:
        if not ptr.get_element_ty().is_bf16():
            return original["create_atomic_cas"](self, ptr, cmp, val, *order)
        bits = (TensorHandle(bf16_bits(h.data), tl.uint16) for h in (cmp, val))
        return TensorHandle(
            from_bf16_bits(original["create_atomic_cas"](self, ptr, *bits, *order).data), tl.bfloat16
        )

    def tree_sum(self: ReduceOps, input: tl.tensor) -> tl.tensor:
        if not input.dtype.is_bf16():
            return reduce_sum(self, input)
        data, ndim = input.handle.data, input.handle.data.ndim
        data = data.reshape(-1) if self.axis is None else np.moveaxis(data, self.axis, 0)
        while len(data) > 1:  # a power of two: the halves are added, and rounded, as the lanes of a warp do
            data = round_to_bf16(data[: len(data) // 2] + data[len(data) // 2 :])
        data = data[0]
        if self.keep_dims:
            data = data.reshape((1,) * ndim) if self.axis is None else np.expand_dims(data, self.axis)
        return self.to_tensor(data, input.dtype)

    def running(combine: np.ufunc, otherwise: Any) -> Any:
        def scan(self: ScanOps, input: tl.tensor) -> list[tl.tensor]:
            if not input.dtype.is_bf16():
                return otherwise(self, input)
            steps = np.moveaxis(input.handle.data, self.axis, 0).copy()
            for i in range(1, len(steps)):
                steps[i] = round_to_bf16(combine(steps[i - 1], steps[i]))
            return [self.to_tensor(np.ascontiguousarray(np.moveaxis(steps, 0, self.axis)), input.dtype)]

        return scan

    def call_grid(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):  # a GPU says nothing when a value overflows
            return run_grid(self, *args, **kwargs)

    def convert_argument(argument: Any) -> Any:
        # A compiled kernel gets a Python float as an fp32 scalar, which has a dtype and methods (`eps.to(…)`).
        if isinstance(argument, float):
            return tl.tensor(TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    def patch_tensor_class(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Triton 3.6 says int(array of one element), which numpy ≥ 2.4 refuses: every loop with a run-time bound.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    triton_interpreter._get_np_dtype = lambda ty: np.dtype(np.float32) if _is_bf16(ty) else np_dtype(ty)
    triton_interpreter._validate_np_data_size = lambda data, ty: fits(
        data, tl.float32 if _is_bf16(ty) else ty
    )
    triton_interpreter._patch_lang_tensor = patch_tensor_class
    triton_interpreter._implicit_cvt = convert_argument
    TensorHandle.__post_init__ = make_handle
    GridExecutor.__call__ = call_grid
    ReduceOps.sum, ScanOps.cumsum, ScanOps.cumprod = (
        tree_sum,
        running(np.add, cumsum),
        running(np.multiply, cumprod),
    )
    for name, new in {
        "create_masked_load": masked_load,
        "create_masked_store": masked_store,
        "cast_impl": cast,
        "create_fp_to_fp": fp_to_fp,
        "create_bitcast": bitcast,
        "create_fabs": fabs,
        "create_fma": fma,
        "create_atomic_rmw": atomic_rmw,
        "create_atomic_cas": atomic_cas,
        "get_bf16": lambda self, value: TensorHandle(np.array([value], np.float32), tl.bfloat16),
        # minNum and maxNum return the operand that is a number; Triton 3.6 has numpy's NaN-propagating pair there.
        "create_minnumf": lambda self, a, b: self.binary_op(a, b, np.fmin),
        "create_maxnumf": lambda self, a, b: self.binary_op(a, b, np.fmax),
    }.items():
        setattr(InterpreterBuilder, name, new)
