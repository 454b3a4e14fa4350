"""How ranks and engines lie on a cluster's nodes: what cannot be, is refused before a job waits for it."""
import pytest

from sao_megatron import config as run_config
from sao_megatron.config import Placement, placement
from sao_megatron.config.cluster import seconds_of
from sao_megatron.errors import UserError

RECIPE = {"name": "test", "model": {"path": "some/model"}, "task": {"name": "guess_number"}}


def config(ranks=16, engines=4, tp=4, **cluster):
    return run_config.parse(RECIPE | {
        "parallel": {"ranks": ranks}, "engine": {"count": engines, "tp": tp},
        "cluster": {"learner_nodes": 2, "rollout_nodes": 2, "gpus_per_node": 8} | cluster})


# If this fails, nodes get other numbers of processes than the recipe asks for.
@pytest.mark.parametrize(("arguments", "expected"), [
    ({}, Placement(8, 2, 1)),
    ({"engines": 16, "tp": 1}, Placement(8, 8, 1)),
    ({"engines": 1, "tp": 16}, Placement(8, 1, 2)),  # one engine over two nodes
    ({"ranks": 4, "engines": 3, "tp": 1, "gpus_per_node": 0}, Placement(2, 2, 1)),
])
def test_placement(arguments, expected):
    assert placement(config(**arguments)) == expected


# If one fails, GPUs idle for a whole job, ranks share a GPU, or the reader does not learn which number to change.
@pytest.mark.parametrize(("arguments", "parts"), [
    ({"ranks": 15}, ["cluster.learner_nodes=2", "parallel.ranks=15"]),
    ({"ranks": 8}, ["parallel.ranks=8", "2 × 8 = 16"]),
    ({"engines": 3}, ["3 × 4 = 12", "2 × 8 = 16"]),
    ({"engines": 4, "tp": 6, "rollout_nodes": 3}, ["engine.tp=6", "cluster.gpus_per_node=8"]),
    ({"ranks": 2, "engines": 1, "tp": 1, "gpus_per_node": 0}, ["cluster.rollout_nodes=2", "engine.count=1"]),
    ({"engines": 600, "tp": 1, "rollout_nodes": 75}, ["engine.count=600", "1200 ports", "1024"]),
])
def test_what_does_not_fill_the_nodes(arguments, parts):
    with pytest.raises(UserError) as caught:
        placement(config(**arguments))
    assert all(part in str(caught.value) for part in parts)


# If this fails, a job starts that has no image to run in, or an image that nothing uses.
@pytest.mark.parametrize("container", [{"runtime": "pyxis"}, {"image": "x.sif"}])
def test_container_without_image(container):
    with pytest.raises(UserError, match="cluster.container: runtime="):
        config(container=container)


# If this fails, a mistyped limit is found out by Slurm, after the job has waited in the queue.
@pytest.mark.parametrize("time", ["tomorrow", "24h", "1:2"])
def test_time_limit(time):
    with pytest.raises(UserError, match="cluster.time"):
        config(time=time)


# If one fails, the run saves itself much too early or too late, for a limit is read otherwise than Slurm reads it.
@pytest.mark.parametrize(("time", "seconds"), [
    ("30", 1800), ("30:10", 1810), ("2:00:00", 7200), ("1-2", 93600), ("1-2:30", 95400), ("1-02:30:05", 95405)])
def test_seconds_of_a_time_limit(time, seconds):
    assert seconds_of(time) == seconds


# If this fails, a job goes back into the queue as soon as it starts, for ever.
def test_signal_before_the_start():
    with pytest.raises(UserError, match="signal_seconds=600 is not less than time=10"):
        config(time="10")


# If this fails, a job of one kind of node waits for two, or the other way round.
def test_heterogeneous():
    assert not config().cluster.heterogeneous
    assert not config(learner_partition="h100", rollout_partition="h100").cluster.heterogeneous
    assert config(learner_partition="h100", rollout_partition="l40").cluster.heterogeneous
