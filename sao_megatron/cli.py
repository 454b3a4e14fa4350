"""`sao-megatron <verb>`: the command line. `train` runs everything on one machine; the role verbs are what it starts.

Exit codes: 0 done, 1 a valid run failed, 2 bad input, 75 ended before its end and to be started again, 130 interrupted.
Heavy imports are inside the verbs, so that help comes at once.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sao_megatron.errors import RunError, Unfinished, UserError

_TRAIN = """\
Train on this machine: checks the recipe, then starts engines, controller and learner ranks, shows one line per step,
and ends them all together. Outputs go to runs/<name>/: config.yaml, logs/, TensorBoard events, summary.json.

example:
  sao-megatron train configs/guess-number-cpu.yaml name=first steps=50 algorithm.eps_high=3.0"""
_SUBMIT = """\
Queue a run on a Slurm cluster: checks layout, nodes, GPUs, memory and checkpoint, asks Slurm whether it would take the
job, then calls sbatch with the options that the recipe's `cluster` section means. docs/slurm.md starts at the login.

examples:
  sao-megatron submit configs/qwen3-30b-a3b-math.yaml --dry-run
  sao-megatron submit configs/qwen3-30b-a3b-math.yaml name=first cluster.account=mine cluster.chain=3"""
_STATUS = """\
How a run is doing, from any machine that sees its folder: step, reward, speed, lag, engines, time by phase, the last
checkpoint, restarts and their causes. Reads only.

example:
  sao-megatron status runs/first --watch"""
_RESUME = """\
Go on with a run that was interrupted or failed, from its newest checkpoint; trajectories that its weights have not been
trained on are trained on again, none twice. Settings of the machine and of the pace may change, and steps may be added.

example:
  sao-megatron resume runs/first steps=100"""
_ROLLOUT = """\
Fill a store with trajectories, without a learner: as many as the recipe's steps train on, sampled from model.path.

example:
  sao-megatron rollout configs/guess-number-cpu.yaml name=recorded 'model={path: some/qwen3-moe, dtype: float32}'"""
_EVALUATE = """\
Play the evaluation sets of one or more tasks with a checkpoint's weights, without a learner, and show solve rates,
pass@k and avg@n. Starts its engines and ends them; outputs go to runs/evaluate-<time>/.

examples:
  sao-megatron evaluate runs/first/hf guess_number evaluation.episodes=64 evaluation.samples=4
  sao-megatron evaluate runs/first/hf tasks/mine.py:Mine evaluation.sets.Mine.task.options.level=3 engine.count=2"""
_REPLAY = """\
Train on the trajectories that a run has recorded, in the batches in which it trained on them, without engines and
controller. With the same recipe it makes the same weights, bit for bit where arithmetic is deterministic (on a CPU).

example:
  sao-megatron replay configs/guess-number-cpu.yaml name=again --trajectories runs/first"""
_ENGINE = """\
Serve the run's model with SGLang, in this process (what `train` starts; on a cluster, once per engine).

example:
  sao-megatron engine runs/first --index 0"""
_CONTROLLER = """\
Run episodes on the run's engines and append each finished trajectory to the run's store, until the learner is done.

example:
  sao-megatron controller runs/first"""
_SANDBOX = """\
Run a model's code for the controllers of a run: one sandbox server (what `train` starts where the recipe has
sandbox.servers; on a cluster, one on each rollout node). Ends at once where this machine cannot isolate it.

example:
  sao-megatron sandbox runs/first --index 0"""
_LEARNER = """\
One learner rank. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT come from whoever starts the ranks.

example:
  torchrun --standalone --nproc-per-node 2 -m sao_megatron.cli learner runs/first"""
_PRETRAIN_VALUE = """\
Train the value model on the trajectories that a run has recorded, before RL: the recipe says which model, layout,
critic and batch size. The result is a folder for `critic.path` of a recipe with the same model and head.

example:
  sao-megatron pretrain-value configs/guess-number-cpu.yaml critic.head=hl_gauss --trajectories runs/first --steps 50"""
_PRESETS = """\
List the algorithms: each is a preset of the same few choices, and `algorithm.<choice>=value` overrides one.

example:
  sao-megatron presets"""
_SUMMARY = """\
Compute runs/<name>/summary.json from the run's store and print it; also of a run that is under way or failed.

example:
  sao-megatron summary runs/first"""

_INSPECT = """\
What the token records of a run say: by lag, side and task, the most dropped tokens, the worst trajectories. With
--html, one page to read trajectories in, each token with its fate and its numbers; it needs no network.

examples:
  sao-megatron inspect runs/first --step 100:200
  sao-megatron inspect runs/first --html first.html
  sao-megatron inspect runs/first --serve
  sao-megatron inspect runs/first --compare runs/second"""


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code. A person's or a run's fault is one sentence on stderr, never a traceback."""
    arguments = _parse(argv)
    try:
        arguments.run(arguments)
    except UserError as error:
        return _fail(error, 2)
    except RunError as error:
        return _fail(error, 1)
    except Unfinished as reason:
        return _fail(reason, 75)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """argparse takes no more key=value once an option has come between: they are added here."""
    parser = _parser()
    arguments, more = parser.parse_known_args(argv)
    if more and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        arguments.overrides = [*arguments.overrides, *more]
    return arguments


def _fail(error: object, code: int) -> int:
    print(f"sao-megatron: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sao-megatron",
                                     description="Asynchronous RL for agentic MoE language models.",
                                     epilog="`sao-megatron <verb> --help` explains a verb by example.")
    verbs = parser.add_subparsers(metavar="<verb>", required=True)

    def verb(name: str, run, text: str, help: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help, description=text,
                               formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.set_defaults(run=run)
        return sub

    train = verb("train", _train, _TRAIN, "train on this machine: start everything, watch it, end it")
    train.add_argument("recipe", type=Path, help="YAML file, such as configs/guess-number-cpu.yaml")
    train.add_argument("overrides", nargs="*", metavar="key=value",
                       help="replace a value of the recipe (dotted key, YAML value)")
    train.add_argument("--slurm", action="store_true",
                       help="on the nodes of this Slurm job (slurm/train.sbatch says so); a run that has begun goes on")
    continued = verb("resume", _resume, _RESUME, "go on with a run from its newest checkpoint")
    continued.add_argument("run_dir", type=Path, help="the run's folder, such as runs/first")
    filled = verb("rollout", _rollout, _ROLLOUT, "fill a store with trajectories, without a learner")
    filled.add_argument("recipe", type=Path, help="YAML file, such as configs/guess-number-cpu.yaml")
    evaluated = verb("evaluate", _evaluate, _EVALUATE, "play evaluation sets with a checkpoint, without a learner")
    evaluated.add_argument("checkpoint", type=Path, help="HF folder, such as runs/<name>/hf")
    evaluated.add_argument("words", nargs="+", metavar="task | key=value",
                           help="tasks by name or path/to/file.py:Class, and values of a recipe")
    replayed = verb("replay", _replay, _REPLAY, "train on recorded trajectories, without engines")
    replayed.add_argument("recipe", type=Path, help="YAML file, such as configs/guess-number-cpu.yaml")
    replayed.add_argument("--trajectories", type=Path, required=True,
                          help="a run's folder, or its trajectories.sqlite")
    for sub in (continued, filled, replayed):
        sub.add_argument("overrides", nargs="*", metavar="key=value", help="replace a value of the recipe")
    queued = verb("submit", _submit, _SUBMIT, "queue a run on a Slurm cluster")
    queued.add_argument("recipe", type=Path, help="YAML file, such as configs/qwen3-30b-a3b-math.yaml")
    queued.add_argument("--dry-run", action="store_true", help="check and show the job, queue nothing")
    queued.add_argument("overrides", nargs="*", metavar="key=value", help="replace a value of the recipe")
    watched = verb("status", _status, _STATUS, "how a run is doing")
    watched.add_argument("run_dir", type=Path, help="the run's folder, such as runs/first")
    watched.add_argument("--watch", action="store_true", help="show it again every few seconds, until Ctrl-C")
    roles = [verb("engine", _engine, _ENGINE, "serve one engine of a run"),
             verb("sandbox", _sandbox, _SANDBOX, "run a model's code for a run"),
             verb("controller", _controller, _CONTROLLER, "run the episodes of a run"),
             verb("learner", _learner, _LEARNER, "run one learner rank of a run"),
             verb("summary", _summary, _SUMMARY, "compute and print a run's summary"),
             verb("inspect", _inspect, _INSPECT, "look at the tokens that a run dropped and kept")]
    for role in roles:
        role.add_argument("run_dir", type=Path, help="the run's folder, such as runs/first")
    roles[0].add_argument("--index", type=int, required=True, help="which of the run's engines, from 0")
    roles[1].add_argument("--index", type=int, required=True, help="which of the run's sandbox servers, from 0")
    roles[2].add_argument("--index", type=int, help="only this one of rollout.controllers, from 0")
    look = roles[-1]
    look.add_argument("--html", type=Path, metavar="out.html", help="write a page instead of printing")
    look.add_argument("--compare", type=Path, metavar="run_dir", help="another run's folder, to stand beside it")
    look.add_argument("--step", metavar="A:B", help="only these steps, both included")
    look.add_argument("--serve", type=int, nargs="?", const=6106, metavar="port",
                      help="show pages to browsers on this machine, where TensorBoard's links lead (port 6106)")
    value = verb("pretrain-value", _pretrain_value, _PRETRAIN_VALUE, "train the value model on recorded trajectories")
    value.add_argument("recipe", type=Path, help="YAML file, such as configs/guess-number-cpu.yaml")
    value.add_argument("--trajectories", type=Path, required=True, help="a run's folder, or its trajectories.sqlite")
    value.add_argument("--steps", type=int, required=True, help="batches to train on")
    value.add_argument("--output", type=Path, help="folder to make (default: runs/<name>-value)")
    value.add_argument("overrides", nargs="*", metavar="key=value", help="replace a value of the recipe")
    verb("presets", _presets, _PRESETS, "list the algorithms")
    return parser


def _train(arguments) -> None:
    from sao_megatron import launcher
    launcher.train(arguments.recipe, arguments.overrides, arguments.slurm)


def _submit(arguments) -> None:
    from sao_megatron.submission import job
    job.submit(arguments.recipe, arguments.overrides, arguments.dry_run)


def _status(arguments) -> None:
    from sao_megatron.telemetry import status
    status.show(arguments.run_dir, arguments.watch)


def _resume(arguments) -> None:
    from sao_megatron import launcher
    launcher.resume(arguments.run_dir, arguments.overrides)


def _rollout(arguments) -> None:
    from sao_megatron import launcher
    launcher.rollout(arguments.recipe, arguments.overrides)


def _evaluate(arguments) -> None:
    from sao_megatron import launcher
    tasks = [word for word in arguments.words if "=" not in word]
    if not tasks:
        raise UserError("evaluate needs a task, such as guess_number or path/to/file.py:Class")
    launcher.evaluate(arguments.checkpoint, tasks, [word for word in arguments.words if "=" in word])


def _replay(arguments) -> None:
    from sao_megatron import launcher
    launcher.replay(arguments.recipe, arguments.overrides, arguments.trajectories)


def _engine(arguments) -> None:
    from sao_megatron import roles
    roles.engine(arguments.run_dir, arguments.index)


def _sandbox(arguments) -> None:
    from sao_megatron import roles
    roles.sandbox(arguments.run_dir, arguments.index)


def _controller(arguments) -> None:
    from sao_megatron import roles
    roles.controller(arguments.run_dir, arguments.index)


def _learner(arguments) -> None:
    from sao_megatron import roles
    roles.learner(arguments.run_dir)


def _pretrain_value(arguments) -> None:
    from sao_megatron import pretraining
    pretraining.pretrain_value(arguments.recipe, arguments.overrides, arguments.trajectories, arguments.steps,
                               arguments.output)


def _presets(_arguments) -> None:
    from sao_megatron.algorithm import presets
    print(presets.table())


def _summary(arguments) -> None:
    from sao_megatron.telemetry import summary
    summary.show(summary.write_summary(arguments.run_dir))


def _inspect(arguments) -> None:
    from sao_megatron.telemetry.inspect import inspect
    inspect(arguments.run_dir, arguments.html, arguments.compare, arguments.step, arguments.serve)


if __name__ == "__main__":
    sys.exit(main())
