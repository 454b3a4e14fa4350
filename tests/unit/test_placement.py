"""Where the processes of a Slurm job go, and what the preflight concludes: without Slurm, on nodes that are only named.

(What Slurm makes of it is in tests/slurm.)
"""
import re
from pathlib import Path

import pytest
from torch.distributed import HashStore

from sao_megatron import config as run_config
from sao_megatron.blame import first_task
from sao_megatron.errors import RunError, Unfinished, UserError
from sao_megatron.launcher import _refuse_a_crash_loop
from sao_megatron.placement.allocation import Allocation, Node
from sao_megatron.placement.preflight import (
    Preflight,
    exchange_name,
    judge_facts,
    judge_pairs,
    judge_reduce,
    rounds,
)
from sao_megatron.placement.slurm import SlurmPlacement, assign
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry.events import Events

H100 = {"parallel": {"ranks": 16, "tp": 4, "ep": 4}, "engine": {"count": 4, "tp": 4},
        "cluster": {"learner_nodes": 2, "rollout_nodes": 2, "gpus_per_node": 8}}


def nodes(*numbers: int, component: int | None = None) -> list[Node]:
    return [Node(f"n{i}", f"10.0.0.{i}", component) for i in numbers]


def place(tmp_path: Path, components: list[list[Node]], **changes) -> SlurmPlacement:
    recipe = {"name": "run", "runs_dir": str(tmp_path), "task": {"name": "guess_number"}, "model": {"path": "models/m"}}
    for key, value in {**H100, **changes}.items():
        recipe[key] = {**H100.get(key, {}), **value}
    config = run_config.parse(recipe)
    return SlurmPlacement(config, RunFolder(config.run_dir), Allocation(77, components, True))


def names(found: list[Node]) -> str:
    return " ".join(node.name for node in found)


# If one fails, a role gets no node, two roles share one, or a bad node is used.
@pytest.mark.parametrize(("components", "spare", "bad", "learner", "rollout", "spares"), [
    ([nodes(1, 2, 3, 4)], 0, [], "n1 n2", "n3 n4", ""),
    ([nodes(1, 2, 3, 4, 5)], 1, ["n2"], "n1 n3", "n4 n5", ""),
    ([nodes(1, 2, 3, 4, 5)], 1, [], "n1 n2", "n3 n4", "n5"),
    ([nodes(1, 2, 5, component=0), nodes(3, 4, component=1)], 1, ["n3"], "n1 n2", "n4 n5", ""),
])
def test_nodes_are_dealt_out(components, spare, bad, learner, rollout, spares):
    section = run_config.parse({"name": "run", "task": {"name": "guess_number"}, "model": {"path": "m"},
                                "cluster": {"learner_nodes": 2, "rollout_nodes": 2, "spare_nodes": spare}}).cluster
    roles = assign(section, components, dict.fromkeys(bad, "broken"))
    assert (names(roles.learner), names(roles.rollout), names(roles.spares)) == (learner, rollout, spares)


# If one fails, a job that cannot hold the run starts it all the same, nobody learns which node to avoid, or good nodes
# are avoided for a fault that all have.
@pytest.mark.parametrize(("count", "bad", "message"), [
    (3, [], "the job has 3 good nodes"), (4, ["n3"], "n3 failed the preflight: broken.*--exclude=n3"),
    (5, ["n1"], "n1, the job's first node, failed the preflight: broken; submit again with --exclude=n1"),
    (4, ["n1", "n2", "n3", "n4"], "4 of the job's 4 nodes are bad, so it is not the nodes(?!.*--exclude)"),
    (5, ["n2", "n3", "n5"], "3 of the job's 5 nodes are bad.*; n5 failed the preflight: broken(?!.*--exclude)")])
def test_too_few_nodes(tmp_path, count, bad, message):
    config = run_config.parse({"name": "run", "task": {"name": "guess_number"}, "model": {"path": "m"}, **H100})
    with pytest.raises(UserError, match=message):
        assign(config.cluster, [nodes(*range(1, count + 1))], dict.fromkeys(bad, "broken"))


# If one fails, a single bad node among many ends the night, or a fault of all nodes sends the job round for ever.
@pytest.mark.parametrize(("bad", "by_script", "error"), [
    (["n3"], True, Unfinished), (["n1"], True, Unfinished), (["n3", "n4"], True, UserError),
    (["n3"], False, UserError)])
def test_a_bad_node_without_a_spare(tmp_path, monkeypatch, bad, by_script, error):
    unwanted = tmp_path / "unwanted"
    if by_script:
        monkeypatch.setenv("SAO_EXCLUDE", str(unwanted))
    with pytest.raises(error, match=f"{bad[0]}.* failed the preflight: broken"):
        place(tmp_path, [nodes(1, 2, 3, 4)]).leave_out(dict.fromkeys(bad, "broken"))
    assert not unwanted.exists() if error is UserError else unwanted.read_text().split() == bad


# If this fails, ranks do not find each other, or two engines share GPUs or ports.
def test_steps_of_a_job_with_gpus(tmp_path):
    network = {"interface": "ib0", "environment": {
        "NCCL_IB_HCA": "mlx5", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}}
    plan = place(tmp_path, [nodes(1, 2, 3, 4)], cluster=network).plan()
    (learner,) = plan.learners
    assert {"--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--nodelist=n1,n2", "--overlap", "--cpu-bind=none",
            "--kill-on-bad-exit=1"} <= set(learner.command)
    assert f"--output={tmp_path}/run/logs/77/learner-%t.log" in learner.command and len(learner.parts) == 16
    assert learner.environment["MASTER_ADDR"] == plan.address == "10.0.0.1"
    assert learner.environment["NCCL_SOCKET_IFNAME"] == "ib0" and learner.environment["NCCL_IB_HCA"] == "mlx5"
    assert learner.environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert learner.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"  # the recipe's goes before ours
    assert not any("PYTORCH_ALLOC_CONF" in engine.environment for engine in plan.engines)
    where = [" ".join(word for word in spec.command if word.startswith(("--nodelist=", "CUDA_VISIBLE_DEVICES=")))
             for spec in plan.engines]
    assert where == [f"--nodelist={node} CUDA_VISIBLE_DEVICES={gpus}" for node in ("n3", "n4")
                     for gpus in ("0,1,2,3", "4,5,6,7")]
    assert [url.rpartition(":")[0] for url in plan.urls] == ["http://10.0.0.3"] * 2 + ["http://10.0.0.4"] * 2
    assert len(set(plan.urls)) == 4
    assert "--nodelist=n1" in plan.controller.command


# If this fails, engines of a large job take the ports of other engines, or of the sandbox servers beside them.
def test_ports_of_many_engines(tmp_path):
    large = {"cluster": {"rollout_nodes": 32}, "engine": {"count": 128, "tp": 2}, "sandbox": {"servers": 32}}
    plan = place(tmp_path, [nodes(*range(1, 35))], **large).plan()
    ports = [int(url.rpartition(":")[2]) for url in plan.urls]
    sandboxes = {int(url.rpartition(":")[2]) for url in plan.sandbox_urls}
    assert len(set(ports)) == 128 and not sandboxes & {*ports, *(port + 128 for port in ports)}
    assert all(10000 <= port < 32768 for port in [*ports, *sandboxes])


# If this fails, an engine that is larger than a node starts as one that is not.
def test_an_engine_over_two_nodes(tmp_path):
    plan = place(tmp_path, [nodes(1, 2, 3, 4)], engine={"count": 1, "tp": 16}).plan()
    (engine,) = plan.engines
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n3,n4"} <= set(engine.command)
    command = engine.command
    assert command[command.index("--nnodes") + 1] == "2" and command[command.index("--node-rank") + 1] == "%t"
    assert command[command.index("--dist-init-addr") + 1].startswith("10.0.0.3:")


# If this fails, the steps of a job over two partitions start in the wrong one.
def test_steps_of_a_heterogeneous_job(tmp_path):
    plan = place(tmp_path, [nodes(1, 2, component=0), nodes(3, 4, component=1)]).plan()
    assert "--het-group=0" in plan.learners[0].command and "--het-group=0" in plan.controller.command
    assert all("--het-group=1" in engine.command for engine in plan.engines)


# If one fails, the roles of a recipe with a container run outside it, with an interpreter that it does not have, or
# with another version of this package than the launcher.
@pytest.mark.parametrize(("container", "expected"), [
    ({"runtime": "pyxis", "image": "/i.sqsh", "mounts": ["/data:/data"]},
     "--container-image=/i.sqsh --container-workdir={cwd} --container-mounts=/data:/data python3 -m "),
    ({"runtime": "apptainer", "image": "/i.sif", "mounts": ["/data:/data"]},
     "apptainer exec --nv --pwd {cwd} --bind /data:/data /i.sif python3 -m ")])
def test_containers(tmp_path, container, expected):
    plan = place(tmp_path, [nodes(1, 2, 3, 4)], cluster={"container": container}).plan()
    for spec in [*plan.learners, plan.controller, *plan.engines]:
        assert expected.format(cwd=Path.cwd()) + "sao_megatron.placement.task" in " ".join(spec.command)
        assert spec.command[spec.command.index("--") + 1] == "python3"
        assert spec.environment["PYTHONPATH"] == str(Path(__file__).parents[2])


# If this fails, the exchanges of many nodes wait for each other, or a pair is never tried.
def test_rounds_use_every_pair_once_and_no_node_twice():
    found = rounds(["a", "b", "c"], ["x", "y"], ["s"])
    assert all(len({name for pair in pairs for name in pair}) == 2 * len(pairs) for pairs in found)
    every = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(every) == len(set(every))
    assert {frozenset((one, other)) for one in "abc" for other in "xy"} <= set(every)
    assert {frozenset("ab"), frozenset("bc"), frozenset("ac"), frozenset("as")} <= set(every)
    assert len(found) == 3 + 3 + 1


GOOD = {"visible": True, "gpus": ["H100, driver 570"] * 2, "free_gb": {"/tmp": 50.0}, "clock": 100.0, "seen": 100.1}


# If one fails, a node that will break the run passes the preflight, or the sentence hides what is wrong with it.
@pytest.mark.parametrize(("fault", "message"), [
    ({"visible": False}, "does not see the run's folder"),
    ({"free_gb": {"/tmp": 0.2}}, r"has less than 1 GB free in /tmp \(0.2 GB\)"),
    ({"clock": 107.5}, r"its clock is \+7.4 s off"),
    ({"gpus": ["H100, driver 570"]}, "has other GPUs than the rest: 1 × H100, driver 570, the others 2 × H100"),
    ({"gpus": ["H100, driver 550"] * 2}, "the others 2 × H100, driver 570"),
])
def test_judge_facts(fault, message):
    bad = judge_facts({"n1/0": GOOD, "n2/0": GOOD | fault, "n3/0": GOOD}, gpus=2)
    assert list(bad) == ["n2"] and re.search(message, bad["n2"])
    assert judge_facts({"n1/0": GOOD, "n2/0": GOOD}, gpus=2) == {}


# If this fails, sandbox servers crowd one node, two share a port, or their node's loss is not seen as theirs.
def test_sandbox_servers_are_dealt_to_the_rollout_nodes(tmp_path):
    placed = place(tmp_path, [nodes(1, 2, 3, 4)], sandbox={"servers": 3})
    plan = placed.plan()
    assert [spec.name for spec in plan.sandboxes] == ["sandbox-0", "sandbox-1", "sandbox-2"]
    assert [url.rpartition(":")[0] for url in plan.sandbox_urls] == [f"http://10.0.0.{i}" for i in (3, 4, 3)]
    assert len({*plan.urls, *plan.sandbox_urls}) == 4 + 3
    assert "--nodelist=n4" in plan.sandboxes[1].command and plan.sandboxes[1].command[-2:] == ["--index", "1"]
    assert names(placed._nodes_of("sandbox-2")) == "n3"


# If one fails, the preflight blames the wrong node.
@pytest.mark.parametrize(("failed", "bad"), [
    ([], []), ([("a", "x"), ("b", "x")], ["x"]), ([("a", "x")], ["x"]), ([("b", "x"), ("b", "y"), ("a", "b")], ["b"]),
    ([("a", "x"), ("b", "x"), ("b", "y")], ["x", "b"])])
def test_judge_pairs(failed, bad):
    pairs = [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y"), ("a", "b")]
    found = judge_pairs({pair: "timeout" if pair in failed else None for pair in pairs}, head="a")
    assert sorted(found) == sorted(bad)


# If this fails, good nodes are left out that had to wait, for a node which hangs or since the job is large.
def test_an_exchange_that_was_never_tried_is_nobodys_fault(tmp_path):
    check = Preflight(nodes(1, 2), nodes(3, 4), [], gpus=0, seconds=60.0, folder=tmp_path)
    store = HashStore()
    for number, pair, begun, answered in [(0, ("n1", "n3"), ("n1", "n3"), ()), (1, ("n1", "n4"), ("n4",), ()),
                                          (0, ("n2", "n4"), ("n2", "n4"), ("n2", "n4"))]:
        for name in begun:
            store.set(f"{exchange_name(number, pair)}/{name}", "")
        for name in answered:
            store.set(f"pair/{number}/{name}", '{"gb_s": 1.5}')
    found = check._exchanges(store, {"n1", "n2", "n3", "n4"})
    assert found == {("n1", "n3"): "no answer in time", ("n2", "n4"): None}
    assert check.untried == ["n1 with n4", "n2 with n3", "n1 with n2"]
    assert list(judge_pairs(found, head="n1")) == ["n3"]


# If this fails, the nodes that waited for a silent one are blamed with it.
def test_judge_reduce():
    answers = {"a/0": {"gb_s": 1.0}, "b/0": {"error": "no answer"}, "c/0": {"error": "timeout"}}
    assert list(judge_reduce(answers)) == ["b"]


# If this fails, the death of one rank of many is blamed on srun, or on a rank that died of it.
def test_the_first_task_to_fail(tmp_path):
    log = tmp_path / "learner.log"
    log.write_text("srun: error: n2: task 9: Killed\nsrun: launch/slurm: Terminating\n"
                   "srun: error: n1: tasks 0-7: Exited with exit code 1\n")
    assert first_task(log) == (9, "n2: Killed")
    log.write_text("srun: error: Node failure on n2\n")
    assert first_task(log) is None


# If this fails, a job that can only fail goes back into the queue for ever, or one that gets further is stopped.
def test_a_crash_loop_ends_with_its_first_cause(tmp_path):
    config = run_config.parse({"name": "run", "runs_dir": str(tmp_path), "task": {"name": "guess_number"},
                               "model": {"path": "m"}, "cluster": {"requeues": 2}})
    folder = RunFolder(config.run_dir)
    folder.path.mkdir()
    journal = Events(folder.events_path)
    for step, cause in [(0, "first night"), (10, "no space left"), (10, "node n2 is down"), (10, "node n3 is down")]:
        journal.add("start", "run", "started", step)
        journal.add("requeue", "run", cause, step)
    with pytest.raises(RunError, match="^no space left\nthat was the first of 3 tries without a checkpoint after step"):
        _refuse_a_crash_loop(config, folder, 10)
    _refuse_a_crash_loop(config, folder, 11)
