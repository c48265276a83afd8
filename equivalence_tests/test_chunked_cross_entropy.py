"""chunked_cross_entropy and cross_entropy for the harness; properties: test_chunked_cross_entropy_properties.py."""

from equivalence_tests.harness.cases import Spec, example
from equivalence_tests.harness.mutants import Mutant

KERNELS, CHUNKS = "fast._chunked_cross_entropy_kernels", "fast._chunked_cross_entropy_chunks"
STATS, DLOGITS, CAPPED = (
    f"{KERNELS}:{n}" for n in ("_cross_entropy_stats", "_cross_entropy_dlogits", "capped")
)
BY_CLASSES, BY_TOKENS, ALONE = (
    f"{CHUNKS}:{n}" for n in ("gradients_by_classes", "gradients_by_tokens", "by_classes")
)
FACTORS, TERMS = f"{CHUNKS}:token_factors", "fast.chunked_cross_entropy:_Terms"
WHOLE = "chunked_cross_entropy"
MUTANTS = [
    Mutant("padding_counted", STATS, 'tl.where(mask, z, float("-inf"))', "z"),
    Mutant("not_rescaled", STATS, "total * shrink", "total"),
    Mutant("later_slices_forget_the_first", STATS, "top, total, z_y = tl.load(MAX + m), tl.load(SUM + m), tl.load(Z_Y + m)",
           "top, total, z_y = tl.load(MAX + m), 0.0 * tl.load(SUM + m), tl.load(Z_Y + m)", of=WHOLE),
    Mutant("label_of_the_slice", STATS, "offs_v == label - first", "offs_v == label", of=WHOLE),
    Mutant("smoothing_of_all_columns", STATS, "tl.where(mask, w * z, 0.0)", "tl.where(mask & (offs_v > 0), w * z, 0.0)"),
    Mutant("no_target_in_the_gradient", DLOGITS, "dr - tl.load(OF_LABEL + m)", "dr"),
    Mutant("gradient_at_the_label_of_the_slice", DLOGITS, "offs_v == label - first", "offs_v == label", of=WHOLE),
    Mutant("no_smoothing_in_the_gradient", DLOGITS, "tl.load(OF_ALL + m) * w", "0.0 * w"),
    Mutant("no_slope_of_the_cap", DLOGITS, "1.0 - t * t", "1.0"),
    Mutant("no_scale_in_the_gradient", DLOGITS, "* w) * scale", "* w)"),
    Mutant("cap_forgotten", CAPPED, "z = cap * t", "z = z * 1.0"),
    Mutant("bias_after_scale", CAPPED, "r += tl.load(BIAS", "r += 0.5 * tl.load(BIAS", of=WHOLE),
    Mutant("z_loss_without_gradient", FACTORS, "2 * z_loss * token * lse", "0.0 * lse"),
    Mutant("smoothing_not_of_p", FACTORS, "of_label + of_all * all_classes", "of_label"),
    Mutant("divisor_of_all_tokens", TERMS, "torch.where(valid, token, 0.0)", "token"),
    Mutant("no_z_loss", TERMS, "self.z_loss * self.token * lse.square()", "0.0 * lse"),
    Mutant("last_chunk_alone", BY_TOKENS, "dw = _accumulated(dw, dr.T, rows, back)", "dw = add_matmul(None, dr.T, rows)",
           dtypes=("fp32", "bf16"), of=WHOLE),
    Mutant("dx_of_one_slice", BY_CLASSES, "dx = add_matmul(dx, dr, part.weight)", "dx = add_matmul(None, dr, part.weight)",
           of=WHOLE),
    Mutant("unit_not_undone", BY_CLASSES, "_scaled(add_matmul(None, dr.T, rows), back)", "add_matmul(None, dr.T, rows)",
           dtypes=("fp16",), of=WHOLE),
    Mutant("dbias_of_other_classes", BY_CLASSES, "dbias[start:end] = dr.sum(0", "dbias[start:end] = dr.flip(1).sum(0", of=WHOLE),
]  # fmt: skip
EXAMPLES = [
    case
    for dtype in ("fp32", "fp16", "bf16")
    for case in (
        example(WHOLE, dtype, {"*": (2, 9), "D": 33, "V": 130}, {"bias": Spec()},
                {"softcap": 5.0, "label_smoothing": 0.1, "logit_scale": 0.25, "chunk_bytes": 4096}),
        example(WHOLE, dtype, {"*": (40,), "D": 20, "V": 257}, {"bias": Spec()},
                {"reduction": "none", "z_loss": 0.01, "chunk_bytes": 4096, "label_smoothing": 0.1}),
        example(WHOLE, dtype, {"*": (30,), "D": 40, "V": 129}, {}, {"reduction": "sum", "z_loss": 0.01, "keep": "nothing"}),
        example("cross_entropy", dtype, {"*": (7,), "V": 5000}, {},
                {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.01, "logit_scale": 0.25}),
    )
]  # fmt: skip
GPU_EXAMPLES = [
    case
    for dtype in ("fp32", "fp16", "bf16")
    for case in (
        example(WHOLE, dtype, {"*": (1000,), "D": 1024, "V": 32001}, {"bias": Spec()}, {"softcap": 5.0}),
        example(WHOLE, dtype, {"*": (2, 500), "D": 512, "V": 32768}, {}, {"reduction": "none", "z_loss": 0.01}),
        example("cross_entropy", dtype, {"*": (300,), "V": 128256}, {}, {"label_smoothing": 0.1}),
    )
]  # fmt: skip
