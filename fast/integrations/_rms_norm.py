"""Find out by running a module whether it computes RMSNorm, and which one.

The module's class is run on random rows and compared with the formulas of reference.rms_norm, its weight replaced by a random
one (a fresh model's weights are all ones or zeros and would hide what is done with them):

    casting="llama"                    weight · round(x̂)         Llama, Mistral, Qwen2, Qwen3, Phi-3, Mixtral, Granite
    casting="gemma"                    round(weight · x̂)         OLMo2, OLMo3, gpt-oss, Gemma 3n, Gemma 4, torch.nn.RMSNorm
    casting="gemma", weight_offset=1   round((1 + weight) · x̂)   Gemma, Gemma 2, Gemma 3, Qwen3-Next
    no weight                          round(x̂)                  with_scale=False

for x and weight in bfloat16 and float32, each with each: what the four dtype pairs round, and promote to, tells them apart.
"""

import copy
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor, nn

import fast
from fast._triton.launch import SUPPORTED
from fast.integrations._forward import Forward, not_one_tensor
from fast.integrations._probe import DTYPES, failure, run
from reference import rms_norm

LOOKS_FOR = "modules without submodules that compute RMSNorm of their one input (found by running them)"
FORMULAS = (("llama", 0.0), ("gemma", 0.0), ("gemma", 1.0), ("llama", 1.0))
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
# Elements of one comparison. A module may sum a row in another order, or use pow(·, -0.5): relative 2⁻²² before rounding, which
# moves an element over a bf16 rounding boundary with probability 2⁻¹⁴. A wrong formula moves more than every tenth.
PROBE_ELEMENTS, CLOSE, MOVED, FAR = 16384, 2.0**-20, 2.0**-10, 2.0**-6


class RMSNormForward(Forward):
    """`forward` by fast.rms_norm, from the module's current weight, bias and eps."""

    operation = "rms_norm"

    def __init__(self, module: nn.Module, eps_name: str, casting: str, weight_offset: float) -> None:
        super().__init__(module)
        self.eps_name, self.casting, self.weight_offset = eps_name, casting, weight_offset

    def __call__(self, *args: Tensor, **named: Tensor) -> Tensor:
        """One tensor, by position or by the name that the class's own forward gives it."""
        x, module = self.tensor(args, named), self.module
        return fast.rms_norm(
            x,
            getattr(module, "weight", None),
            bias=getattr(module, "bias", None),
            eps=_eps(module, self.eps_name),
            weight_offset=self.weight_offset,
            casting=self.casting,
        )


def detect(module: nn.Module) -> Forward | str | None:
    """The replacement; or why a module that looks like a norm gets none; or None for a module that does not."""
    eps_name = next((name for name in EPS_NAMES if hasattr(module, name)), None)
    if eps_name is None and "norm" not in type(module).__name__.lower():
        return None
    if next(module.children(), None) is not None:
        return "has submodules" if "norm" in type(module).__name__.lower() else None
    return _refusal(module, eps_name) or _classify(module, eps_name)


def _refusal(module: nn.Module, eps_name: str | None) -> str | None:
    """What can be said without running it."""
    parameters = dict(module.named_parameters(recurse=False))
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if why := not_one_tensor(module):
        return why
    if eps_name is None:
        return f"has none of the attributes {', '.join(EPS_NAMES)}"
    if not isinstance(getattr(module, eps_name), float | int | None):
        return f"{eps_name} is a {type(getattr(module, eps_name)).__name__}, not a number"
    if set(shapes) - {"weight", "bias"} or next(module.buffers(recurse=False), None) is not None:
        return "has parameters besides weight and bias, or buffers"
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        return f"parameters are not of one shape [N]: {shapes}"
    if any(parameter.is_meta for parameter in parameters.values()):
        return "its parameters are on the meta device (not loaded, or offloaded); patch once they are on their device"
    if unsupported := {p.dtype for p in parameters.values()} - set(SUPPORTED):
        return f"its parameters are {', '.join(map(str, unsupported))}; fast.rms_norm takes {', '.join(map(str, SUPPORTED))}"
    return None


def _classify(module: nn.Module, eps_name: str) -> Forward | str:
    parameter = next(module.parameters(), None)
    alive = set(FORMULAS[:1] if parameter is None else FORMULAS)
    device = torch.device("cpu") if parameter is None else parameter.device
    for x_dtype, weight_dtype, probe, x in _probes(module, eps_name, device):
        pair = f"x {x_dtype} and weight {weight_dtype}".replace("torch.", "")
        try:
            got = run(probe, x)
        except Exception as error:  # whatever a foreign forward raises is a reason, not our error
            if x_dtype == weight_dtype:
                return failure(error, pair, x)
            continue  # a pair of dtypes that the module refuses never reaches its replacement
        eps = _eps(module, eps_name)
        survivors = {f for f in alive if _same(got, _formula(probe, x, eps, *f))}
        if not survivors:
            return f"no RMSNorm formula gives its values on {pair}, with eps from {eps_name} = {eps}"
        alive = survivors
    casting, weight_offset = min(alive, key=FORMULAS.index)
    return RMSNormForward(module, eps_name, casting, weight_offset)


def _probes(
    module: nn.Module, eps_name: str, device: torch.device
) -> Iterator[tuple[torch.dtype, torch.dtype, nn.Module, Tensor]]:
    """Copies of the module with random parameters, and rows for them: some with mean square near eps, which shows eps."""
    generator = torch.Generator().manual_seed(0)
    parameters = dict(module.named_parameters(recurse=False))
    # Without parameters a module takes any N, unless it names its own as torch's norms do.
    N = next(
        (p.shape[0] for p in parameters.values()), (getattr(module, "normalized_shape", None) or (128,))[-1]
    )
    rows = max(6, -(-PROBE_ELEMENTS // N))
    on = {"generator": generator, "device": "cpu"}  # whatever the default device is
    scales = torch.tensor([1.0, 30.0, max(_eps(module, eps_name), 1e-6) ** 0.5], device="cpu")
    scale = scales.repeat(rows)[: 2 * rows].view(2, rows, 1)
    x = scale * (torch.randn(2, rows, N, **on) + 0.3)
    random = {name: torch.randn(N, **on) + 0.4 for name in parameters}
    for x_dtype, weight_dtype in product(DTYPES, DTYPES) if parameters else zip(DTYPES, DTYPES, strict=True):
        # Shallow: hooks, and whatever else hangs on a module, are neither copied nor run.
        probe = copy.copy(module)
        vars(probe)["_parameters"] = {
            name: nn.Parameter(value.to(device, weight_dtype), requires_grad=False)
            for name, value in random.items()
        } | {name: None for name, parameter in module._parameters.items() if parameter is None}
        yield x_dtype, weight_dtype, probe, x.to(device, x_dtype)


def _formula(probe: nn.Module, x: Tensor, eps: float, casting: str, weight_offset: float) -> Tensor:
    weight, bias = getattr(probe, "weight", None), getattr(probe, "bias", None)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        return rms_norm(x, weight, bias=bias, eps=eps, weight_offset=weight_offset, casting=casting)


def _same(got: object, want: Tensor) -> bool:
    if not isinstance(got, Tensor) or got.dtype != want.dtype or got.shape != want.shape:
        return False
    difference = (got.double() - want.double()).abs() / want.double().abs().clamp_min(2.0**-60)
    return bool((difference <= FAR).all()) and float((difference > CLOSE).double().mean()) <= MOVED


def _eps(module: nn.Module, name: str) -> float:
    """torch.nn.RMSNorm's eps of None is the machine epsilon of the dtype it computes in."""
    eps = getattr(module, name)
    return torch.finfo(torch.float32).eps if eps is None else eps
