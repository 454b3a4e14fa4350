"""One rank of test_checkpoint.py: trains, saves, trains on; then loads, under several layouts, and trains on."""
from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch.distributed as dist

from sao_megatron.learner import integrity, runtime
from sao_megatron import config as configs
from sao_megatron.checkpoints import CheckpointFolder
from sao_megatron.errors import UserError
from sao_megatron.learner.checkpoint import Saver, load
from sao_megatron.learner.trainer import Trainer
from sao_megatron.weights import hf

sys.path.insert(0, str(Path(__file__).parent))
from convert_worker import flip_bit_of_data  # noqa: E402
from layout_worker import gather_export  # noqa: E402

SAVED, MORE = 2, 2


def trainer_of(folder: Path, data: dict, sizes: dict, algorithm: dict, dtype: str, source) -> Trainer:
    parallel = configs.ParallelSection(ranks=int(os.environ["WORLD_SIZE"]), **sizes)
    runtime.initialize(parallel, seed=0)
    config = configs.parse(dict(
        name="t", model=dict(path=str(folder / "model"), dtype=dtype), parallel=parallel.model_dump(),
        algorithm=algorithm, task=dict(name="random"), batch=dict(tokens_per_micro_batch=60), steps=6,
        policy_optimizer=dict(lr=1e-3, warmup_steps=1, min_lr_ratio=0.1), critic_optimizer=dict(lr=1e-3)))
    trainer = Trainer(config, hf.read_config(folder / "model"), source)
    trainer.begin_reinforcement()
    return trainer


def train_on(trainer: Trainer, data: dict, first: int, steps: int) -> dict:
    """What `steps` steps lead to: their metrics, the policy's and the critic's weights."""
    batches = data["batches"]
    metrics = [trainer.train_step(batches[i % len(batches)], version=i).metrics for i in range(first, first + steps)]
    critic = gather_export(trainer.critic.shards) if trainer.critic else {}
    return {"metrics": metrics, "policy": gather_export(trainer.policy_shards), "critic": critic}


def damaged(trainer: Trainer, checkpoint) -> list[str]:
    """What the ranks say, of which one loads the item that has a flipped bit; then the bit is as it was."""
    path = max(checkpoint.path.glob("*.distcp"))
    whole = path.read_bytes()
    dist.barrier()
    if dist.get_rank() == 0:
        flip_bit_of_data(path)
    dist.barrier()
    said: list = [None] * dist.get_world_size()
    try:
        integrity.check(checkpoint.path, share=dist.get_rank(), shares=dist.get_world_size())
        mine = ""
    except UserError as error:
        mine = str(error)
    dist.all_gather_object(said, mine)
    if dist.get_rank() == 0:
        path.write_bytes(whole)
    dist.barrier()
    return sorted(said)


def said_of_another_model(trainer: Trainer, checkpoint) -> str:
    """What a rank says whose model folder has got another config.json since."""
    right = trainer.hf_config
    trainer.hf_config = right | {"rope_theta": 7.0}
    try:
        load(trainer, checkpoint)
    except UserError as error:
        return str(error)
    finally:
        trainer.hf_config = right
    return ""


@contextmanager
def full_disk():
    """Files cannot grow beyond 1000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def main(folder: Path, cases: dict[str, dict]) -> None:
    data = pickle.loads((folder / "data.pkl").read_bytes())
    results = {}
    for name, case in cases.items():
        checkpoints = CheckpointFolder(folder / name)
        arguments = folder, data
        trainer = trainer_of(*arguments, case["saved"], case["algorithm"], case["dtype"],
                             hf.SafetensorsFolder(folder / "model"))
        train_on(trainer, data, 0, SAVED)
        saver = Saver(trainer, checkpoints, generation=0)
        saver.save(step=SAVED, updates=SAVED)
        results[name] = {"straight": train_on(trainer, data, SAVED, MORE)}
        saver.finish()
        if case.get("kill"):  # before the others, so that they would show if it left something behind
            saver.save(step=SAVED + MORE, updates=SAVED + MORE)
            if dist.get_rank() == 1:
                os.kill(saver._pending._writer.pid, signal.SIGKILL)
            saver.finish()
            with full_disk() if dist.get_rank() == 1 else nullcontext():  # its writer inherits that
                saver.save(step=SAVED + MORE, updates=SAVED + MORE)
            saver.finish()
            results[name]["damaged"] = damaged(trainer, checkpoints.latest())
            results[name]["another model"] = said_of_another_model(trainer, checkpoints.latest())
            results[name]["left"] = [path.name for path in checkpoints.path.iterdir()]
        results[name]["complete"] = [checkpoint.step for checkpoint in checkpoints.complete()]
        for layout, sizes in case["loaded"].items():
            trainer = trainer_of(*arguments, sizes, case["algorithm"], case["dtype"], None)
            load(trainer, checkpoints.latest())
            results[name][layout] = train_on(trainer, data, SAVED, MORE)
    if dist.get_rank() == 0:
        (folder / f"results-{dist.get_world_size()}.pkl").write_bytes(pickle.dumps(results))


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    dist.destroy_process_group()
