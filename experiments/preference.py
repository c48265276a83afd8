"""DPO and KTO on a language model's hidden states, without logits: what reduction="none" is for.

    python -m experiments.preference [--loss dpo kto] [--device cpu] [--pairs 4] [--tokens 64] [--json FILE]

Both need log π(answer | prompt), the sum of a sequence's log probabilities, of the policy and of a frozen reference model. Fused,
it is minus fast.chunked_cross_entropy token by token, summed; unfused, log_softmax of all logits: the same loss, the same
gradients. Pairs are pieces of the text that CPython ships: chosen as it stands, rejected with every other token drawn at random.

DPO: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290. KTO: Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306.
"""

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BETA = 0.1
LOSSES = ("dpo", "kto")
WAYS = ("unfused", "fused")


@dataclass(frozen=True)
class Pairs:
    """chosen, rejected: token ids [B, T]; the first `prompt` tokens of a row are the prompt, the same in both."""

    chosen: Tensor
    rejected: Tensor
    prompt: int

    @property
    def ids(self) -> Tensor:
        return torch.cat([self.chosen, self.rejected])

    @property
    def labels(self) -> Tensor:
        """The answers' tokens; −100 in the prompts."""
        labels = self.ids.clone()
        labels[:, : self.prompt] = -100
        return labels


def pairs_of_text(tokenizer: Any, vocabulary: int, pairs: int, tokens: int, device: str) -> Pairs:
    from equivalence_tests.harness.real import batches

    (chosen,) = batches(tokenizer, tokens, pairs, device=device)
    generator = torch.Generator().manual_seed(0)
    other = torch.randint(vocabulary, chosen.shape, generator=generator).to(device)
    prompt = tokens // 4
    place = torch.arange(tokens, device=device)
    return Pairs(chosen, torch.where((place >= prompt) & (place % 2 == 0), other, chosen), prompt)


def log_probabilities(model: nn.Module, pairs: Pairs, way: str) -> Tensor:
    """log π of each answer [2 B], the chosen ones first."""
    x = model.get_decoder()(input_ids=pairs.ids).last_hidden_state
    weight, labels = model.get_output_embeddings().weight, pairs.labels
    if way == "fused":
        from fast import chunked_cross_entropy

        return -chunked_cross_entropy(x, weight, labels, reduction="none", shift=True).sum(-1)
    logits = functional.linear(x, weight)[:, :-1].float()
    target = labels[:, 1:]
    found = functional.log_softmax(logits, -1).gather(-1, target.clamp_min(0)[..., None])[..., 0]
    return torch.where(target == -100, 0.0, found).sum(-1)


def dpo(policy: Tensor, reference: Tensor) -> Tensor:
    """−log σ(β · (gain of the chosen answer − gain of the rejected one)), gain = log π − log π_reference."""
    chosen, rejected = (policy - reference).chunk(2)
    return -functional.logsigmoid(BETA * (chosen - rejected)).mean()


def kto(policy: Tensor, reference: Tensor) -> Tensor:
    """1 − σ(±β · (gain − z)), + for chosen answers; z: the batch's mean gain, at least 0, a constant."""
    gain = policy - reference
    z = gain.mean().clamp_min(0).detach()
    chosen, rejected = gain.chunk(2)
    return torch.cat(
        [1 - torch.sigmoid(BETA * (chosen - z)), 1 - torch.sigmoid(BETA * (z - rejected))]
    ).mean()


def step(
    policy: nn.Module, frozen: nn.Module, pairs: Pairs, loss: Callable, way: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """One loss and its gradients by parameter name: two forward passes, each of all answers, and one backward."""
    with torch.no_grad():
        reference = log_probabilities(frozen, pairs, way)
    found = loss(log_probabilities(policy, pairs, way), reference)
    policy.zero_grad(set_to_none=True)
    found.backward()
    return found.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def models(device: str) -> tuple[nn.Module, nn.Module, Any, str]:
    """(policy, frozen reference, tokenizer, label); the policy is a little off, or the first loss would say nothing."""
    from equivalence_tests.harness.real import load

    frozen, tokenizer, label = load()
    frozen = copy.deepcopy(frozen).to(device).requires_grad_(False)
    policy = copy.deepcopy(frozen).requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p += (
                0.02 * p.std() * torch.randn(p.shape, generator=generator).to(device)
                if p.numel() > 1
                else 0.0
            )
    return policy, frozen, tokenizer, label


def measured(loss: str, way: str, policy: nn.Module, frozen: nn.Module, pairs: Pairs) -> dict[str, Any]:
    """Loss, milliseconds of a step, and on a GPU its peak memory beyond what was there before."""
    cuda = pairs.chosen.is_cuda
    run = lambda: step(policy, frozen, pairs, globals()[loss], way)  # noqa: E731  named for what follows
    value, _ = run()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    record = {
        "preference": loss,
        "way": way,
        "loss": float(value),
        "step_ms": 1e3 * (time.perf_counter() - start),
    }
    record["shape"] = "×".join(map(str, pairs.ids.shape))
    return record | ({"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20} if cuda else {})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.preference", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--loss", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"]
    )
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of prompt and answer together")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write JSON lines, one record per loss and way"
    )
    given = parser.parse_args(argv)
    if given.pairs < 1 or given.tokens < 8:
        print(
            f"preference: --pairs must be at least 1 and --tokens 8; got {given.pairs}, {given.tokens}",
            file=sys.stderr,
        )
        return 2
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    policy, frozen, tokenizer, label = models(given.device)
    pairs = pairs_of_text(tokenizer, policy.config.vocab_size, given.pairs, given.tokens, given.device)
    records = [
        measured(loss, way, policy, frozen, pairs) | {"model": label} for loss in given.loss for way in WAYS
    ]
    for r in records:
        peak = f", {r['peak_mib']:.0f} MiB at the peak" if "peak_mib" in r else ""
        print(
            f"{r['preference']} {r['way']}: loss {r['loss']:.6f}, {r['step_ms']:.1f} ms a step{peak}, {r['shape']} tokens"
        )
    print(f"model: {label}")
    if given.json:
        given.json.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
