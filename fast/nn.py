"""Modules over `fast` functions. Parameters are named as in torch.nn and Transformers, so their checkpoints load as they are."""

import torch
from torch import Tensor, nn

from fast import CrossEntropyStats, chunked_cross_entropy, rms_norm, swiglu, swiglu_mlp
from reference._chunked_cross_entropy_check import check_chunked_cross_entropy
from reference.rms_norm import check_rms_norm
from reference.swiglu import check_swiglu, check_swiglu_mlp


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


class SwiGLU(nn.Module):
    """fast.swiglu with its options; no parameters.

    Raises TypeError and ValueError for options that fast.swiglu does not allow.
    """

    def __init__(
        self,
        *,
        activation: str = "silu",
        alpha: float = 1.0,
        limit: float | None = None,
        up_offset: float = 0.0,
    ) -> None:
        super().__init__()
        meta = torch.empty(1, 1, device="meta")
        dims = {"gate": (meta, "* F"), "up": (meta, "* F")}
        check_swiglu("swiglu", dims, activation, alpha, limit, up_offset)
        self.activation, self.alpha, self.limit, self.up_offset = activation, alpha, limit, up_offset

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [*, F] → h [*, F]. Halves (`packed.chunk(2, -1)`) and alternating columns (`packed[..., ::2]`) of one packed
        [*, 2F] tensor are read where they lie."""
        return swiglu(gate, up, **_options(self))

    def extra_repr(self) -> str:
        return _described(self)


class SwiGLUMLP(nn.Module):
    """fast.swiglu_mlp with its weights: the gated MLP block of width D and ffn width F.

    The weights are held by torch.nn.Linear modules that Transformers' names have, so that its checkpoints load as they are:
    gate_proj, up_proj [F, D] and down_proj [D, F] (Llama, Mistral, Qwen, Gemma), with packed=True gate_up_proj [2F, D], whose
    first half is the gate's, and down_proj (Phi-3, GLM-4). They are not called: their weights and biases are read.
    bias: for every projection. recompute: keep x alone for the backward pass.

    Raises TypeError and ValueError for options that fast.swiglu_mlp does not allow; at the call TypeError where a projection
    became something whose weight is not all that it computes with: replaced (by LoRA, by a quantised one), or given hooks.
    """

    def __init__(
        self,
        D: int,
        F: int,
        *,
        activation: str = "silu",
        alpha: float = 1.0,
        limit: float | None = None,
        up_offset: float = 0.0,
        bias: bool = False,
        recompute: bool = False,
        packed: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        x, w_in, w_down = (torch.empty(shape, device="meta") for shape in ((1, D), (F, D), (D, F)))
        none = (None, None, None)
        check_swiglu_mlp(x, w_in, w_in, w_down, *none, activation, alpha, limit, up_offset, recompute)
        self.activation, self.alpha, self.limit, self.up_offset = activation, alpha, limit, up_offset
        self.recompute = recompute
        widths = {"gate_up_proj": 2 * F} if packed else {"gate_proj": F, "up_proj": F}
        self.projections = (*widths, "down_proj")
        for name, width in widths.items():
            self.add_module(name, nn.Linear(D, width, bias, device, dtype))
        self.down_proj = nn.Linear(F, D, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [*, D] → y [*, D]; x and the parameters of one dtype."""
        for name in self.projections:
            if why := not_plain(getattr(self, name)):
                raise TypeError(f"SwiGLUMLP: {name} {why}; only its weight and bias would be read")
        return swiglu_mlp(
            x, **projection_tensors(self, self.projections), **_options(self), recompute=self.recompute
        )

    def extra_repr(self) -> str:
        return f"{_described(self)}, recompute={self.recompute}"


def not_plain(projection: object) -> str | None:
    """Why y = x · weightᵀ + bias is not (all of) what calling a projection does; None where it is."""
    kind = type(projection)
    if kind is not nn.Linear:
        return f"is a {kind.__module__}.{kind.__qualname__}, not a plain torch.nn.Linear"
    if has_hooks(projection):
        return "has hooks, or a forward bound on this instance"
    return None


def has_hooks(module: object) -> bool:
    """Whether calling the module does more than its class's forward."""
    if not isinstance(module, nn.Module):
        return False
    hooks = module._forward_hooks or module._forward_pre_hooks
    backward_hooks = module._backward_hooks or module._backward_pre_hooks
    return bool(hooks or backward_hooks) or "forward" in module.__dict__


def projection_tensors(module: nn.Module, projections: tuple[str, ...]) -> dict[str, Tensor | None]:
    """The weights and biases that swiglu_mlp takes, as they are now. projections: names of gate, up and down, or of gate and up
    packed by halves, and down."""
    *inner, down = (getattr(module, name) for name in projections)
    if len(inner) == 1:
        # One chunk, not two slices: backward concatenates its two gradients once.
        (w_gate, w_up), bias = inner[0].weight.chunk(2), inner[0].bias
        b_gate, b_up = (None, None) if bias is None else bias.chunk(2)
    else:
        (w_gate, b_gate), (w_up, b_up) = ((linear.weight, linear.bias) for linear in inner)
    tensors = {"w_gate": w_gate, "w_up": w_up, "w_down": down.weight}
    return tensors | {"b_gate": b_gate, "b_up": b_up, "b_down": down.bias}


def _options(module: SwiGLU | SwiGLUMLP) -> dict[str, str | float | None]:
    return {
        "activation": module.activation,
        "alpha": module.alpha,
        "limit": module.limit,
        "up_offset": module.up_offset,
    }


def _described(module: SwiGLU | SwiGLUMLP) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in _options(module).items())


class ChunkedCrossEntropyLoss(nn.Module):
    """fast.chunked_cross_entropy with its options: a head and torch.nn.CrossEntropyLoss in one; the head stays the caller's.

    weight: class weights [V], a buffer, as in torch.nn.CrossEntropyLoss. The other options are fast.chunked_cross_entropy's.
    Raises TypeError and ValueError for options that fast.chunked_cross_entropy does not allow.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        shift: bool = False,
        keep: str = "auto",
        chunk_bytes: int | None = None,
        return_stats: bool = False,
    ) -> None:
        super().__init__()
        meta = torch.empty(1 if weight is None else len(weight), 1, device="meta")
        labels = torch.empty(len(meta), dtype=torch.int64, device="meta")
        classes = None if weight is None else weight.to("meta")
        check_chunked_cross_entropy(
            meta, meta, labels, None, reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, classes, None,
            None, shift, None, keep, chunk_bytes, return_stats,
        )  # fmt: skip
        self.register_buffer("weight", weight)
        self.options = {
            "reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss,
            "softcap": softcap, "logit_scale": logit_scale, "shift": shift, "keep": keep, "chunk_bytes": chunk_bytes,
            "return_stats": return_stats,
        }  # fmt: skip

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        token_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        lora: tuple | None = None,
    ) -> Tensor | tuple[Tensor, CrossEntropyStats]:
        """The loss of hidden states x [*, D] under the head weight [V, D], for integer labels target [*]."""
        own = {"bias": bias, "token_weight": token_weight, "normalizer": normalizer, "lora": lora}
        return chunked_cross_entropy(x, weight, target, class_weight=self.weight, **own, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
