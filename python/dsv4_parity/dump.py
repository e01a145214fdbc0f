"""Calls of another stack as a folder that `parity blame --dump` judges, each on its own inputs.

    from dsv4_parity.dump import Dump

    with Dump("theirs") as dump:
        for number, layer in enumerate(model.layers):
            dump.hook(layer.attn_norm, "rms_norm", "attn_norm", number, weights={"weight": "weight"}, eps=1e-6)
        model(token_ids)

Tensors have the operators' names (`parity ops rms_norm`). They are numpy's, with bf16 as its bits in
uint16 (`dsv4_parity.to_bf16`) or as `ml_dtypes.bfloat16`, or torch's.
"""

import json
import struct
from pathlib import Path

TYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "uint16": "BF16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
}


def encoded(tensor):
    """The type of a tensor in a file, its shape and its bytes."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in TYPES:
        raise TypeError(f"element type {tensor.dtype} must be one of {', '.join(TYPES)}")
    shape = [int(extent) for extent in tensor.shape]
    if hasattr(tensor, "detach"):
        import torch

        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return TYPES[name], shape, tensor.tobytes()


class Dump:
    """Calls that are recorded until the end of a `with`, which writes them."""

    def __init__(self, folder):
        self.folder, self.tensors, self.fields, self.number = Path(folder), {}, {}, 0

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.save()

    def call(self, operator, name, layer, tensors, **fields):
        """Records a call. What it overwrote is also in `tensors`, as `NAME:after`."""
        place = "-" if layer is None else str(layer)
        key = f"{self.number:06}/{place}/{operator}/{name}"
        self.number += 1
        self.tensors.update({f"{key}/{own}": encoded(tensor) for own, tensor in tensors.items()})
        if fields:
            self.fields[key] = fields

    def hook(self, module, operator, name, layer=None, inputs=("x",), outputs=("y",), weights=None, **fields):
        """Records each forward of a torch module. `inputs` and `outputs` name its positional arguments and its
        results, `weights` maps the operator's names to the module's attributes."""

        def record(module, given, found):
            found = found if isinstance(found, tuple) else (found,)
            tensors = dict(zip(inputs, given)) | dict(zip(outputs, found))
            tensors |= {own: getattr(module, theirs) for own, theirs in (weights or {}).items()}
            self.call(operator, name, layer, tensors, **fields)

        return module.register_forward_hook(record)

    def save(self):
        """Writes all calls so far, as one file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        header, start = {}, 0
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(data)]}
            start += len(data)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        data = b"".join(data for _, _, data in self.tensors.values())
        (self.folder / "calls.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        (self.folder / "calls.json").write_text(json.dumps(self.fields, indent=1))
