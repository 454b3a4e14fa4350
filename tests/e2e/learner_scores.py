"""Log-probs of trajectories under the exported checkpoint, by one learner rank: RUN_FOLDER TRAJECTORIES ANSWER."""
import pickle
import sys
from pathlib import Path

import torch.distributed as dist

from sao_megatron.config import ParallelSection
from sao_megatron.learner import runtime
from sao_megatron.learner.trainer import Trainer
from sao_megatron.run_folder import RunFolder
from sao_megatron.weights.hf import SafetensorsFolder, read_config


def main(run_folder: Path, trajectories: Path, answer: Path) -> None:
    config = RunFolder(run_folder).config().model_copy(update={"parallel": ParallelSection()})
    exported = run_folder / "hf"
    runtime.initialize(config.parallel, config.seed)
    trainer = Trainer(config, read_config(exported), SafetensorsFolder(exported))
    answer.write_bytes(pickle.dumps(trainer.score(pickle.loads(trajectories.read_bytes()))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
