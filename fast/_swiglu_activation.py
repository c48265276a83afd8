"""a(z) and its slope, for every activation of swiglu: what the elementwise kernels and the GEMM epilogue share.

Each activation is x·s(z) with z = alpha·x:  silu s = σ(z);  gelu_tanh s = σ(2·√(2/π)·(z + 0.044715·z³));
gelu s = Φ(z);  relu2 s = max(z, 0). Its derivative by x is s(z) + z·s'(z).
"""

import triton
import triton.language as tl


@triton.jit
def activation_value(gate, up, alpha, limit, up_offset, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """h of gate and up, all fp32."""
    if HAS_LIMIT:
        gate, up = _clamped(gate, up, limit)
    s, _ = _factor(alpha * gate, ACTIVATION)
    return gate * s * (up + up_offset)


@triton.jit
def activation_gradients(
    gate, up, dh, alpha, limit, up_offset, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr
):
    """dgate, dup and h, all fp32. A clamp passes the gradient where it changes nothing."""
    raw_gate, raw_up = gate, up
    if HAS_LIMIT:
        gate, up = _clamped(gate, up, limit)
    z = alpha * gate
    s, zds = _factor(z, ACTIVATION)
    a, u = gate * s, up + up_offset
    dgate, dup = dh * u * (s + zds), dh * a
    if HAS_LIMIT:
        dgate = tl.where(raw_gate <= limit, dgate, 0.0)
        dup = tl.where(tl.abs(raw_up) <= limit, dup, 0.0)
    return dgate, dup, a * u


@triton.jit
def _clamped(gate, up, limit):
    # By comparison, which lets NaN through.
    gate = tl.where(gate > limit, limit, gate)
    return gate, tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def _factor(z, ACTIVATION: tl.constexpr):
    """s(z) and z·s'(z)."""
    if ACTIVATION == "silu":
        s, ds = _sigmoid(z)
        zds = z * ds
    elif ACTIVATION == "gelu_tanh":
        # Past ±40 s is 0 or 1 and s' is 0 in any precision; z³ would overflow.
        t = tl.where(z > 40.0, 40.0, tl.where(z < -40.0, -40.0, z))
        s, ds = _sigmoid(1.5957691216057308 * (t + 0.044715 * t * t * t))
        zds = z * (ds * (1.5957691216057308 * (1.0 + 0.134145 * t * t)))
    elif ACTIVATION == "gelu":
        s = 0.5 * (1.0 + tl.erf(0.7071067811865476 * z))
        zds = z * (0.3989422804014327 * tl.exp(-0.5 * z * z))
    else:
        s = tl.where(z < 0.0, 0.0, z)
        zds = s
    return s, zds


@triton.jit
def _sigmoid(z):
    """σ(z) and σ'(z) from e^−|z|, which cannot overflow and cancels nowhere."""
    e = tl.exp(-tl.abs(z))
    r = 1.0 / (1.0 + e)
    return tl.where(z < 0.0, e * r, r), e * r * r
