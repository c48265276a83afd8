"""NF4 weights in bitsandbytes' forms: the state of a Params4bit, and the entries of a state_dict.

Entries of a weight called "weight": weight (the codes, [n, 1]); weight.absmax (the scales: fp32, or uint8 where they are
quantised); weight.quant_map (the table); weight.nested_absmax and weight.nested_quant_map (scales of the scales, and the map);
weight.quant_state.bitsandbytes__nf4 (the rest as JSON in a uint8 tensor).
"""

import json
from typing import Any

import torch
from torch import Tensor

from reference._quantized_weights_tables import MAP_BLOCK

FIELDS = ("codes", "table", "shape", "block", "dtype", "absmax", "absmax_codes", "absmax2", "code", "offset")
SUFFIX = ".quant_state.bitsandbytes__"


def fields(weight: Any) -> dict[str, Any]:
    """The arguments that make an equal weight."""
    return {name: getattr(weight, name) for name in FIELDS}


def of_params(params: Tensor) -> dict[str, Any]:
    """The same from a Params4bit."""
    state = getattr(params, "quant_state", None)
    if state is None:
        raise ValueError(
            "from_bitsandbytes: params4bit has no quant_state; move it to a device to quantise it first"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            "from_bitsandbytes: params4bit is packed for bitsandbytes' CPU inference; take it before that"
        )
    given = {"shape": state.shape, "dtype": state.dtype, "nested": None, "absmax": state.absmax}
    if state.state2 is not None:
        given["nested"] = state.state2.absmax, state.state2.code, state.offset, state.state2.blocksize
    return _made("from_bitsandbytes", params.detach(), state.quant_type, state.code, state.blocksize, **given)


def written(weight: Any, name: str) -> dict[str, Tensor]:
    """Entries of a state_dict."""
    rest = {"quant_type": "nf4", "blocksize": weight.block, "shape": list(weight.shape)}
    rest["dtype"] = str(weight.dtype).removeprefix("torch.")
    entries = {name: weight.codes[:, None], f"{name}.quant_map": weight.table}
    if weight.absmax is not None:
        entries[f"{name}.absmax"] = weight.absmax
    else:
        rest |= {
            "nested_blocksize": MAP_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": weight.offset.item(),
        }
        entries |= {f"{name}.absmax": weight.absmax_codes, f"{name}.nested_absmax": weight.absmax2}
        entries[f"{name}.nested_quant_map"] = weight.code
    text = list(json.dumps(rest).encode())
    return entries | {f"{name}{SUFFIX}nf4": torch.tensor(text, dtype=torch.uint8)}


def read(state: dict[str, Tensor], name: str) -> dict[str, Any]:
    """The arguments that make the weight, from such entries. Raises ValueError naming the one that is missing."""
    kinds = [key.rsplit("__", 1)[1] for key in state if key.startswith(name + SUFFIX)]
    if len(kinds) != 1:
        raise ValueError(f"from_state_dict: state must have one entry {name}{SUFFIX}nf4, found {len(kinds)}")

    def entry(suffix: str) -> Tensor:
        if name + suffix not in state:
            raise ValueError(f"from_state_dict: state has no entry {name + suffix}")
        return state[name + suffix]

    rest = json.loads(bytes(entry(SUFFIX + kinds[0]).tolist()))
    given = {"shape": rest["shape"], "dtype": getattr(torch, rest["dtype"]), "nested": None}
    if "nested_offset" in rest:
        offset, size = torch.tensor(rest["nested_offset"], dtype=torch.float32), rest["nested_blocksize"]
        given["nested"] = entry(".nested_absmax"), entry(".nested_quant_map"), offset, size
    kind, table, block = rest["quant_type"], entry(".quant_map"), rest["blocksize"]
    return _made("from_state_dict", entry(""), kind, table, block, absmax=entry(".absmax"), **given)


def _made(
    function: str,
    data: Tensor,
    kind: str,
    table: Tensor,
    block: int,
    *,
    shape: Any,
    dtype: torch.dtype,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor, int] | None,
) -> dict[str, Any]:
    if kind != "nf4":
        raise ValueError(f"{function}: quant_type must be 'nf4', got {kind!r}")

    def fp32(tensor: Tensor) -> Tensor:
        return tensor.to(data.device, torch.float32)

    # FSDP wants floating-point storage: the same bytes under another dtype.
    codes = data.reshape(-1).contiguous().view(torch.uint8)
    made = {"codes": codes, "table": fp32(table), "shape": tuple(shape), "block": block, "dtype": dtype}
    if nested is None:
        return made | {"absmax": fp32(absmax)}
    absmax2, code, offset, size = nested
    if size != MAP_BLOCK:
        raise ValueError(f"{function}: nested_blocksize must be {MAP_BLOCK}, got {size}")
    nested_state = {"absmax2": fp32(absmax2), "code": fp32(code), "offset": fp32(offset).reshape(())}
    return made | {"absmax_codes": absmax.to(data.device)} | nested_state
