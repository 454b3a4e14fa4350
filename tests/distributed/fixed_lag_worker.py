"""One rank of test_fixed_lag.py: a few steps at lag 2, keeping every sampled batch and every version's weights."""
from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from fixed_lag import FixedLag
import numpy as np
import torch

from sao_megatron import config
from sao_megatron.errors import UserError
from sao_megatron.run_folder import RunFolder


def score(sampler, weights: dict, version: int, trajectory) -> np.ndarray:
    """Log-probs of its action tokens under `weights`, by forward passes over every prefix."""
    sampler.load(weights, version)
    where = np.flatnonzero(trajectory.action_mask)
    tokens = trajectory.tokens.tolist()
    logits = sampler.next_logits([tokens[:i] for i in where]).log_softmax(-1)
    return logits.gather(1, torch.tensor(trajectory.tokens[where])[:, None].long())[:, 0].numpy()


def main(recipe: str, out: str) -> None:
    small = ["steps=6", "algorithm.critic_only_steps=2", "warmup.steps=20", "batch.trajectories=16",
             "evaluation.episodes=15", "policy_optimizer.lr=0.01"]
    lagging = FixedLag(config.load(recipe, small), lag=2)
    batches, weights = [], {0: lagging.start}
    train = lagging.trainer.train_step

    def recording(trajectories, version, update_policy):
        weights[version] = lagging._weights()
        if update_policy:
            batches.append((version, trajectories))
        return train(trajectories, version, update_policy)
    lagging.trainer.train_step = recording
    result = lagging.run(evaluate_every=3)
    rows = []
    for version, trajectories in batches:
        sampled = int(trajectories[0].action_versions[0])
        of = {name: max(np.abs(score(lagging.sampler, weights[v], v, t) - t.rollout_logprobs[t.action_mask]).max()
                        for t in trajectories) for name, v in (("then", sampled), ("now", version))}
        rows.append(dict(version=version, sampled=sorted({int(v) for t in trajectories for v in t.action_versions}),
                         **{name: float(value) for name, value in of.items()}))
    recorded = FixedLag(config.load(recipe, small), lag=0, start=lagging.start,
                        folder=RunFolder(Path(out).parent / "run"))
    fresh = recorded.run(evaluate_every=3)
    recorded.record.close()
    try:
        FixedLag(config.load(recipe, ["rollout.routing_replay=true"]), lag=0)
        refused = ""
    except UserError as error:
        refused = str(error)
    Path(out).write_text(json.dumps(dict(rows=rows, result=result, fresh=fresh, refused=refused)))


if __name__ == "__main__":
    main(*sys.argv[1:])
