"""Find out by running a module whether it computes a gated MLP, and which one.

A module is looked at if its projections have the names of one of LAYOUTS. They have to be plain torch.nn.Linear modules, since
their weights will be read and they themselves never called. Then its class is run with small random projections in place of its
own and compared with

    y = w_down · (a(w_gate · x) ∘ (w_up · x))      a: silu, gelu_tanh, gelu, relu2, silu with alpha = 1.702; clamped or not

in float32 and bfloat16, in eval and in training mode, on rows of sizes from 2⁻² to 2¹⁰: dropout, another activation, a
multiplier, a sparsity cutoff or a clamp shows in the values.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import fast
from fast._triton.launch import SUPPORTED
from fast.integrations._forward import Forward, not_one_tensor
from fast.integrations._probe import DTYPES, failure, run
from fast.nn import SwiGLUMLP, has_hooks, not_plain, projection_tensors
from reference import swiglu

LOOKS_FOR = "modules with the projections of a gated MLP that compute one (found by running them)"
# Names of gate, up and down; or of gate and up packed by halves, and down.
LAYOUTS = (
    ("gate_proj", "up_proj", "down_proj"),  # Llama, Mistral, Qwen, Gemma, OLMo, Cohere
    ("gate_up_proj", "down_proj"),  # Phi-3, GLM-4
    ("w1", "w3", "w2"),  # Llama's own code, LFM2
    ("input_linear", "output_linear"),  # Granite's shared experts
)
FORMULAS = (("silu", 1.0), ("gelu_tanh", 1.0), ("gelu", 1.0), ("relu2", 1.0), ("silu", 1.702))
ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation")
LIMIT_NAMES = ("limit", "swiglu_limit")  # bounds of gate and up, as DeepSeek-V4 has them

D, F, ROWS = 12, 20, 24
SCALES = (2.0**-2, 2.0, 2.0**4, 2.0**10)
# Roundings, in units of the dtype's roundoff u, against h computed exactly from the same gate and up:
#   a = g·s       8 u·|g|·max(1, s): Transformers' activations in Python (0.5·x·(1 + tanh(…))) round s, which is made from 1 + t
#                 with t near −1, by up to 6 u absolutely, and g·s twice; fused ones once. Then a, rounded, is stored.
#   g, u clamped  2: a limit that the dtype does not have
#   h = a·u, y    2
# and second orders; each is times the sum of |w_down|·|g·u|·max(1, s), and |b_down|. Transformers' modules come to 1.5 u. In fp32
# the next formula, gelu beside gelu_tanh, is 1700 u away, the others 10⁵ u and more.
ROUNDINGS = 16


class SwiGLUMLPForward(Forward):
    """`forward` by fast.swiglu_mlp, from the current weights and biases of the module's projections."""

    operation = "swiglu_mlp"

    def __init__(
        self,
        module: nn.Module,
        projections: tuple[str, ...],
        activation: str,
        alpha: float,
        limit_name: str | None,
    ) -> None:
        super().__init__(module)
        self.projections, self.activation, self.alpha = projections, activation, alpha
        self.limit_name = limit_name
        self.others = _others(module, projections)

    def __call__(self, *args: Tensor, **named: Tensor) -> Tensor:
        """One tensor, by position or by the name that the class's own forward gives it.

        Raises RuntimeError where a projection or the activation was replaced, wrapped or given hooks since `patch`.
        """
        x, module = self.tensor(args, named), self.module
        if why := self.changed():
            raise RuntimeError(
                f"{type(module).__name__}: {why}. It was patched to run fast.swiglu_mlp on plain weights, which would ignore "
                "that; unpatch the model first (fast.integrations.unpatch), or patch it after such changes"
            )
        return fast.swiglu_mlp(
            x,
            **projection_tensors(module, self.projections),
            activation=self.activation,
            alpha=self.alpha,
            limit=None if self.limit_name is None else getattr(module, self.limit_name),
        )

    def changed(self) -> str | None:
        for name in self.projections:
            if why := not_plain(getattr(self.module, name)):
                return f"{name} {why}"
        for name, other in self.others.items():
            if getattr(self.module, name, None) is not other:
                return f"{name} was replaced"
            if has_hooks(other):
                return f"{name} has hooks"
        return None


def detect(module: nn.Module) -> Forward | str | None:
    """The replacement; or why a module with such projections gets none; or None for a module without."""
    for projections in LAYOUTS:
        if all(isinstance(getattr(module, name, None), nn.Module | Tensor) for name in projections):
            return _refusal(module, projections) or _classify(module, projections)
    return None


def _refusal(module: nn.Module, projections: tuple[str, ...]) -> str | None:
    """What can be said without running it."""
    if isinstance(module, SwiGLUMLP):
        return "runs fast.swiglu_mlp by itself"
    for name in projections:
        if why := not_plain(getattr(module, name)):
            return f"{name} {why}"
    tensors = {name: t for name, t in module.named_parameters() if name.split(".")[0] in projections}
    others = {name for name, _ in (*module.named_parameters(), *module.named_buffers())} - set(tensors)
    if others:
        return f"has parameters or buffers besides those of its projections: {', '.join(sorted(others))}"
    if hooked := [name for name, other in _others(module, projections).items() if has_hooks(other)]:
        return f"{', '.join(hooked)} has hooks"
    return _tensors_refused(tensors) or _shapes_refused(module, projections) or not_one_tensor(module)


def _tensors_refused(tensors: dict[str, Tensor]) -> str | None:
    dtypes, devices = {t.dtype for t in tensors.values()}, {t.device for t in tensors.values()}
    if subclasses := {type(t).__name__ for t in tensors.values()} - {"Parameter"}:
        return f"its weights are {', '.join(sorted(subclasses))}s, not plain parameters"
    if any(t.is_meta for t in tensors.values()):
        return "its weights are on the meta device (not loaded, or offloaded); patch once they are on their device"
    if unsupported := dtypes - set(SUPPORTED):
        return f"its weights are {_listed(unsupported)}; fast.swiglu_mlp takes {_listed(SUPPORTED)}"
    if len(dtypes) > 1 or len(devices) > 1:
        kinds = dtypes if len(dtypes) > 1 else devices
        return f"its weights and biases are not of one dtype and device: {_listed(kinds)}"
    return None


def _shapes_refused(module: nn.Module, projections: tuple[str, ...]) -> str | None:
    *inner, down = (tuple(getattr(module, name).weight.shape) for name in projections)
    D, F = down
    if inner == ([(2 * F, D)] if len(inner) == 1 else [(F, D)] * 2):
        return None
    shapes = ", ".join(f"{name} {list(getattr(module, name).weight.shape)}" for name in projections)
    return f"the shapes of its weights are not those of a gated MLP: {shapes}"


def _classify(module: nn.Module, projections: tuple[str, ...]) -> Forward | str:
    alive = [(*formula, limit_name) for limit_name in (None, *_limits(module)) for formula in FORMULAS]
    for training, dtype in product((False, True), DTYPES):
        x, probe = _probe(module, projections, dtype, training)
        given = f"{dtype} in {'training' if training else 'eval'} mode".replace("torch.", "")
        try:
            got = run(probe, x)
        except Exception as error:  # whatever a foreign forward raises is a reason, not our error
            return failure(error, given, x)
        alive = [formula for formula in alive if _same(got, probe, projections, x, *formula)]
        if not alive:
            return f"no gated MLP formula gives its values on {given}{_activation_described(module)}"
    return SwiGLUMLPForward(module, projections, *alive[0])


def _probe(
    module: nn.Module, projections: tuple[str, ...], dtype: torch.dtype, training: bool
) -> tuple[Tensor, nn.Module]:
    """x [2, ROWS, D], and a copy of the module with random projections of widths D and F. Shallow: what else hangs on the module
    is shared, and hooks are not run."""
    generator = torch.Generator().manual_seed(0)
    device = getattr(module, projections[0]).weight.device

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    x = random(2, ROWS, D) * torch.tensor(SCALES, device="cpu").repeat(ROWS // len(SCALES))[:, None]
    stand_ins = {}
    for name in projections:
        own = getattr(module, name)
        width_in, width_out = (
            (F, D) if name == projections[-1] else (D, 2 * F if len(projections) == 2 else F)
        )
        stand_ins[name] = _ExactLinear(
            width_in, width_out, bias=own.bias is not None, device="meta", dtype=dtype
        )
        for key, parameter in list(stand_ins[name].named_parameters()):
            value = random(*parameter.shape) / (width_in**0.5 if key == "weight" else 1)
            setattr(stand_ins[name], key, nn.Parameter(value.to(device, dtype), requires_grad=False))
    return x.to(device, dtype), _copied(module, training, stand_ins)


def _copied(module: nn.Module, training: bool, stand_ins: dict[str, nn.Module]) -> nn.Module:
    probe = copy.copy(module)
    children = {
        name: child and _copied(child, training, {})
        for name, child in module._modules.items()
        if name not in stand_ins
    }
    vars(probe).update(training=training, _modules=children | stand_ins)
    return probe


class _ExactLinear(nn.Linear):
    """Rounds once, from float64: neither TF32 nor the order of a sum shows in a probe, so gate and up are known exactly."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            raise RuntimeError(f"a projection of {self.weight.dtype} was given {x.dtype}")
        return self.wide(x).to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.double()
        return nn.functional.linear(x.double(), self.weight.double(), bias)


def _same(
    got: object,
    probe: nn.Module,
    projections: tuple[str, ...],
    x: Tensor,
    activation: str,
    alpha: float,
    limit_name: str | None,
) -> bool:
    """Whether the module's result is that of this formula, up to ROUNDINGS."""
    if not isinstance(got, Tensor) or got.dtype != x.dtype or got.shape != x.shape:
        return False
    *inner, down = (getattr(probe, name) for name in projections)
    limit = None if limit_name is None else getattr(probe, limit_name)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        columns = torch.cat([linear(x) for linear in inner], -1).double()
        gate, up = columns.chunk(2, -1)
        want = down.wide(swiglu(gate, up, activation=activation, alpha=alpha, limit=limit))
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        size = (gate * up).abs() * (gate.clamp(min=1) if activation == "relu2" else 1)
        bound = nn.functional.linear(size, down.weight.double().abs())
        bound = bound if down.bias is None else bound + down.bias.double().abs()
        u = torch.finfo(x.dtype).eps / 2
        return bool(((got.double() - want).abs() <= ROUNDINGS * u * bound).all())


def _others(module: nn.Module, projections: tuple[str, ...]) -> dict[str, Any]:
    """What the module calls besides its projections: its other submodules, and an activation that is a function."""
    children = {name: child for name, child in module._modules.items() if name not in projections}
    functions = {name: vars(module)[name] for name in ACTIVATION_NAMES if callable(vars(module).get(name))}
    return children | functions


def _limits(module: nn.Module) -> Iterator[str]:
    for name in LIMIT_NAMES:
        limit = getattr(module, name, None)
        if isinstance(limit, float | int) and 0 < limit < float("inf"):
            yield name


def _activation_described(module: nn.Module) -> str:
    found: list[Callable] = [getattr(module, name) for name in ACTIVATION_NAMES if hasattr(module, name)]
    return f" (its activation: {getattr(found[0], '__name__', type(found[0]).__name__)})" if found else ""


def _listed(values: Any) -> str:
    return ", ".join(sorted(map(str, values)))
