"""Registers launchers as PyTorch operators, so that torch.compile, export, fake tensors and opcheck see one opaque op.

The autograd.Function stays outside and calls these ops: cheaper on the host than custom_op + register_autograd, works in the
interpreter, and leaves double backward to the Function (measured: see paper_notes/measuring.md).
"""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("tandem", "DEF")


def define(schema: str, launcher: Callable, fake: Callable) -> Callable:
    """Define tandem::<schema> with fresh outputs: `launcher` for CUDA and (in the interpreter) CPU, `fake` for the shapes."""
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, launcher, key)
    torch.library.register_fake(f"tandem::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.tandem, name).default
