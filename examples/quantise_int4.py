"""Round the projections of a checkpoint to int4, in the form of compressed-tensors.

    python examples/quantise_int4.py SOURCE TARGET [--group 32]

SOURCE is a folder with config.json and safetensors, or the name of a model that comes with
batchgen, such as nano_hybrid. Each value becomes the nearest of 16, with a scale for a group of
neighbours in its row. No data is looked at, so methods that do (GPTQ, AWQ) lose less.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import batchgen
from batchgen.kernels.four_bit.int4_weight import quantise_int4

PROJECTION = re.compile(r"layers\.\d+\..*_proj(\.weight)?$")
"""Linear layers of attention, of feed-forward parts and of experts."""


def quantise(source: Path, target: Path, group: int) -> int:
    """Write the checkpoint in int4 and return how many tensors were rounded."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    kept: dict[str, torch.Tensor] = {}
    rounded, left_out = 0, []
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if not PROJECTION.search(name) or tensor.shape[-1] % group or tensor.shape[-1] % 8:
                left_out.append(name.removesuffix(".weight"))
                kept[name] = tensor
                continue
            weight = quantise_int4(tensor, group)
            at = name.removesuffix(".weight")
            kept[f"{at}.weight_packed"] = weight.values.contiguous().view(torch.int32)
            kept[f"{at}.weight_scale"] = weight.scales
            kept[f"{at}.weight_shape"] = torch.tensor(tensor.shape)
            rounded += 1
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights | {"symmetric": True}}
        },
        "ignore": left_out,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return rounded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    parser.add_argument("--group", type=int, default=32, help="values that share a scale")
    options = parser.parse_args()
    shipped = Path(batchgen.__file__).parent / "data" / options.source
    source = shipped if shipped.is_dir() else Path(options.source)
    if not (source / "config.json").is_file():
        parser.error(f"{source} has no config.json, as the folder of a model has")
    if options.target.exists():
        parser.error(f"{options.target} exists: name a new folder")
    rounded = quantise(source, options.target, options.group)
    print(f"{options.target}: {rounded} tensors in int4, groups of {options.group}")


if __name__ == "__main__":
    main()
