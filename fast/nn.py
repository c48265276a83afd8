"""Modules over `fast` functions. Parameters are named as in torch.nn and Transformers, so their checkpoints load as they are."""

import torch
from torch import Tensor, nn

from fast import rms_norm
from reference.rms_norm import check_rms_norm


class RMSNorm(nn.Module):
    """fast.rms_norm with its parameters: weight [N], and bias [N] on request; both None with elementwise_affine=False.

    The default loads state_dicts of torch.nn.RMSNorm and of Transformers' RMSNorm modules. For Gemma's take
    weight_offset=1.0, casting="gemma"; for torch.nn.RMSNorm's rounding and OLMo2's casting="gemma".
    Raises ValueError for options that fast.rms_norm does not allow.
    """

    def __init__(
        self,
        N: int,
        eps: float = 1e-6,
        *,
        weight_offset: float = 0.0,
        casting: str = "llama",
        bias: bool = False,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if bias and not elementwise_affine:
            raise ValueError("RMSNorm: bias=True needs elementwise_affine=True")
        meta = torch.empty(1, N, device="meta")
        check_rms_norm(meta, meta[0] if elementwise_affine else None, None, None, eps, weight_offset, casting)
        self.N, self.eps, self.weight_offset, self.casting = N, eps, weight_offset, casting
        for name, wanted in (("weight", elementwise_affine), ("bias", bias)):
            value = nn.Parameter(torch.empty(N, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gain 1: weight = 1 − weight_offset, bias = 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [*, N] → y [*, N]; with residual [*, N] → (y, residual_out), the norm of x + residual and that sum."""
        options = {"eps": self.eps, "weight_offset": self.weight_offset, "casting": self.casting}
        return rms_norm(x, self.weight, bias=self.bias, residual=residual, **options)

    def extra_repr(self) -> str:
        affine = f"elementwise_affine={self.weight is not None}, bias={self.bias is not None}"
        return f"{self.N}, eps={self.eps}, weight_offset={self.weight_offset}, casting={self.casting!r}, {affine}"
