"""Convert checkpoints between HF's format and the learner's, and compare them. No GPU is used.

  python tools/convert.py hf-to-megatron models/Qwen3-30B-A3B checkpoints/start
  python tools/convert.py megatron-to-hf runs/first/checkpoints/step-00000040 exports/first
  python tools/convert.py verify exports/first runs/first/checkpoints/step-00000040
  torchrun --nproc-per-node 8 tools/convert.py hf-to-megatron …      (shared by 8 processes, also on several hosts)

Each process holds about 5 GiB at a time, whatever the model's size. A conversion that was stopped goes on when the same
command is given again; its target appears only when it is complete. Exit codes: 0 done (verify: equal), 1 verify found
a difference, or a process failed, 2 bad input.
"""
from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

from sao_megatron.errors import RunError, UserError

_HF_TO_MEGATRON = """\
Write an HF folder (safetensors; experts single or fused; float8 with block scales is multiplied out) as a checkpoint of
the learner that holds a policy only. It loads under any layout. Tensors that the model has no place for, such as those
of multi-token prediction, are left out.

example:
  python tools/convert.py hf-to-megatron models/Qwen3-30B-A3B checkpoints/start --dtype bfloat16"""
_MEGATRON_TO_HF = """\
Write the policy of a checkpoint of the learner, whatever layout wrote it, as an HF folder with index, tokenizer and
checksums, in the type that it is stored in.

example:
  python tools/convert.py megatron-to-hf runs/first/checkpoints/step-00000040 exports/first"""
_VERIFY = """\
Compare every tensor of two checkpoints, each an HF folder or one of the learner's, bit by bit, and print the first
differences with their coordinates, and the fields of config.json with which the two compute differently. Tensors stored
in different types are compared in the second one's. With one folder: read all of it, and compare it with its checksums
(folders written by this package have them).

example:
  python tools/convert.py verify models/Qwen3-30B-A3B checkpoints/start"""


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the module that names the weights is built without TransformerEngine
    warnings.filterwarnings("ignore", module=r"torch\.")  # that a process without others saves alone
    from sao_megatron.conversion import formats, verify
    try:
        match arguments.verb:
            case "hf-to-megatron":
                formats.hf_to_megatron(arguments.source, arguments.target, arguments.dtype)
            case "megatron-to-hf":
                formats.megatron_to_hf(arguments.source, arguments.target, arguments.model, arguments.mtp == "keep")
            case "verify":
                return int(verify.verify(arguments.first, arguments.second) > 0)
    except UserError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"convert: {error.filename or arguments}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    verbs = parser.add_subparsers(dest="verb", metavar="<verb>", required=True)
    there = verbs.add_parser("hf-to-megatron", help="HF folder to a checkpoint of the learner",
                             description=_HF_TO_MEGATRON, formatter_class=shape)
    there.add_argument("source", type=Path, help="HF folder")
    there.add_argument("target", type=Path, help="folder to make")
    there.add_argument("--dtype", choices=("bfloat16", "float32"),
                       help="type to store (default: the one that config.json names)")
    back = verbs.add_parser("megatron-to-hf", help="checkpoint of the learner to an HF folder",
                            description=_MEGATRON_TO_HF, formatter_class=shape)
    back.add_argument("source", type=Path, help="checkpoint, such as runs/first/checkpoints/step-00000040")
    back.add_argument("target", type=Path, help="folder to make")
    back.add_argument("--model", type=Path, help="folder with config.json and tokenizer, where the checkpoint's run or "
                                                 "its model have moved")
    back.add_argument("--mtp", choices=("drop", "keep"), default="drop",
                      help="keep: copy the layers for multi-token prediction from the folder that --model names")
    check = verbs.add_parser("verify", help="compare two checkpoints, or one with its checksums", description=_VERIFY,
                             formatter_class=shape)
    check.add_argument("first", type=Path, help="HF folder, or checkpoint of the learner")
    check.add_argument("second", type=Path, nargs="?", help="another, of either kind")
    return parser


if __name__ == "__main__":
    sys.exit(main())
