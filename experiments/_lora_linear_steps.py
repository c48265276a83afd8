"""The steps between eager PyTorch and fast.lora_linear: one adapter, a frozen base, no options.

All round where the reference does, once. So the plain product is kept in fp32 wherever something is added to it afterwards, and
what has more digits than 16 bits hold enters a 16-bit product as hi + lo.
"""

import torch
from torch import Tensor

from fast import _lora_linear_stack as stack
from fast._lora_linear_skinny import skinny, summed
from fast._triton import matmul as products

ALIGNED = 64  # columns; a contraction that is no multiple of it multiplies slower


def halves(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """t as hi + lo of dtype."""
    hi = t.to(dtype)
    return hi, (t - hi.to(t.dtype)).to(dtype)


def side_by_side(t: Tensor, u: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors of dtype whose plain product is t [M, R] · u [R, N], t in fp32: t_hi, t_lo, t_hi beside each other, and below
    each other u_hi, u_hi, u_lo."""
    if dtype == torch.float32:
        return t, u.to(dtype)
    t_hi, t_lo = halves(t, dtype)
    if u.dtype == dtype:
        return torch.cat([t_hi, t_lo], 1), torch.cat([u, u])
    u_hi, u_lo = halves(u, dtype)
    return torch.cat([t_hi, t_lo, t_hi], 1), torch.cat([u_hi, u_hi, u_lo])


def times(z: Tensor, u: Tensor) -> Tensor:
    """z [M, C] · u [C, R] in fp32, in one product of z's dtype."""
    if u.dtype == z.dtype or z.dtype == torch.float32:
        return products.add_matmul(None, z, u.to(z.dtype))
    both = products.add_matmul(None, z, torch.cat(halves(u, z.dtype), 1))
    return both[:, : u.shape[1]] + both[:, u.shape[1] :]


def eager(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor) -> tuple[Tensor]:
    wide = torch.float32
    down = products.matmul(x.to(wide), lora_a.to(wide).T)
    up = products.matmul(down, lora_b.to(wide).T) * scale
    return ((products.add_matmul(None, x, weight.T) + up).to(x.dtype),)


def no_copy_of_x(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor) -> tuple[Tensor]:
    t, u = side_by_side(times(x, lora_a.T) * scale, lora_b.T, x.dtype)
    up = products.add_matmul(None, t, u)
    return (up.add_(products.add_matmul(None, x, weight.T)).to(x.dtype),)


def added_in_place(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor) -> tuple[Tensor]:
    t, u = side_by_side(times(x, lora_a.T) * scale, lora_b.T, x.dtype)
    return (products.add_matmul(products.add_matmul(None, x, weight.T), t, u).to(x.dtype),)


def augmented(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor) -> tuple[Tensor]:
    t, u = side_by_side(times(x, lora_a.T) * scale, lora_b.T, x.dtype)
    padding = -t.shape[1] % ALIGNED
    left = torch.cat([x, t, t.new_zeros(len(t), padding)], 1)
    right = torch.cat([weight, u.T, u.new_zeros(u.shape[1], padding)], 1)
    return (products.matmul(left, right.T),)


def fast(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor) -> tuple[Tensor]:
    layer = _layer(weight, lora_a, lora_b, scale)
    return (stack.stack_fwd(x, [layer], stack.Dropout(None, 0.0), None, None, True)[0][0],)


def eager_backward(
    dy: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor, wide_x: Tensor, s: Tensor, **_: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    wide = dy.to(torch.float32)
    scaled = wide * scale
    ds = products.matmul(scaled, lora_b.to(wide.dtype))
    da, db = products.matmul(ds.T, wide_x), products.matmul(scaled.T, s)
    through = products.matmul(ds, lora_a.to(wide.dtype))
    dx = products.add_matmul(None, wide.to(dy.dtype), weight) + through
    return dx.to(dy.dtype), da.to(lora_a.dtype), db.to(lora_b.dtype)


def no_copy_of_dy(
    dy: Tensor, x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor, t: Tensor, **_: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    ds, db = times(dy, lora_b) * scale, times(dy.T, t)
    return _dx_added_in_place(dy, weight, lora_a, ds), times(x.T, ds).T.to(lora_a.dtype), db.to(lora_b.dtype)


def one_pass_over_dy(
    dy: Tensor, x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor, t: Tensor, **_: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    R = len(lora_a)
    parts, sums = skinny(dy, lora_b, t, x.device)
    ds = summed(parts, torch.empty_like(t), R, x.device, scale.reshape(1))
    db = summed(sums, torch.empty_like(lora_b), R, x.device)
    _, sums = skinny(x, None, ds, x.device)
    da = torch.empty_like(lora_a)
    summed(sums, da.T, R, x.device)
    return _dx_added_in_place(dy, weight, lora_a, ds), da, db


def fast_backward(
    dy: Tensor, x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor, t: Tensor, **_: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    layer, saved = _layer(weight, lora_a, lora_b, scale), stack.Saved(t, [None], [None])
    needed = [[False, True, True, False, False]]
    dx, ((_, da, db, _, _),) = stack.stack_bwd(
        [dy], x, [layer], saved, stack.Dropout(None, 0.0), None, None, True, needed
    )
    return dx, da[0], db[0]


def _dx_added_in_place(dy: Tensor, weight: Tensor, lora_a: Tensor, ds: Tensor) -> Tensor:
    t, u = side_by_side(ds, lora_a, dy.dtype)
    return products.add_matmul(products.add_matmul(None, dy, weight), t, u).to(dy.dtype)


def _layer(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: Tensor) -> stack.Layer:
    return stack.Layer(weight, lora_a[None], lora_b[None], scale.reshape(1), None, None)
