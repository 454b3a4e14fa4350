"""Log-probs of trajectories under the exported checkpoint, by Transformers alone: RUN_FOLDER TRAJECTORIES ANSWER."""
import pickle
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from sao_megatron.trajectory.types import Trajectory


@torch.no_grad()
def score(model, trajectory: Trajectory) -> np.ndarray:
    """float32 [num_actions]."""
    tokens = torch.from_numpy(trajectory.tokens).long()
    logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1].float(), -1)
    return logprobs.gather(1, tokens[1:, None])[:, 0].numpy()[trajectory.action_mask[1:]]


def main(run_folder: Path, trajectories: Path, answer: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run_folder / "hf").eval()
    scores = [score(model, trajectory) for trajectory in pickle.loads(trajectories.read_bytes())]
    answer.write_bytes(pickle.dumps(scores))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
