"""Before the roles start on a cluster: do the nodes agree, reach each other, see the run's folder? A bad one is named.

One task per node (per GPU, where there are some) answers through a TCP store of the launcher's, so that a node whose
network is broken, or whose GPU is missing, still gets a sentence that names it. A node that does not even answer is
left out of the exchanges, so that it costs the others no waiting.
"""
from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sao_megatron.blame import last_words
from sao_megatron.placement.allocation import Node
from sao_megatron.supervisor import ProcessSpec, Supervisor

if TYPE_CHECKING:
    from torch.distributed import TCPStore

CLOCK_SECONDS = 2.0
"""By which a node's clock may differ from the launcher's."""
FREE_GB = 1.0
"""In the run's folder, /tmp and shared memory."""
POLL_SECONDS = 0.2
Pair = tuple[str, str]


def rounds(learner: list[str], rollout: list[str], spares: list[str]) -> list[list[Pair]]:
    """Every learner node with every rollout node, the learner's in a ring, spares with the first: no node twice in a
    round, so that the time grows with the larger side and not with the product."""
    few, many = sorted((learner, rollout), key=len)
    found = [[(node, many[(i + shift) % len(many)]) for i, node in enumerate(few)] for shift in range(len(many))]
    ring = list(zip(learner, learner[1:], strict=False)) + ([(learner[-1], learner[0])] if len(learner) > 2 else [])
    closing = [ring.pop()] if len(learner) > 2 else []
    found += [ring[0::2], ring[1::2], closing, *([(learner[0], spare)] for spare in spares)]
    return [pairs for pairs in found if pairs]


def exchange_name(number: int, pair: Pair) -> str:
    """Under which the two of a round's pair meet; each says at `<name>/<node>` that it has begun."""
    return f"exchange-{number}-{pair[0]}-{pair[1]}"


class Preflight:
    """Of the nodes of one job. `nodes`: the head first, which is where we are."""

    def __init__(self, learner: list[Node], rollout: list[Node], spares: list[Node], gpus: int, seconds: float,
                 folder: Path):
        """`gpus`: on every node. `seconds`: for all of it. `folder`: the run's, which all must see."""
        self.learner, self.nodes = [node.name for node in learner], [*learner, *rollout, *spares]
        self.names = [node.name for node in self.nodes]
        self.gpus, self.seconds, self.folder = gpus, seconds, folder
        self.rounds = rounds(self.learner, [node.name for node in rollout], [node.name for node in spares])
        self.tasks = [f"{name}/{i}" for name in self.names for i in range(max(1, gpus))]
        self.reducers = [task for task in self.tasks if task.split("/")[0] in self.learner]
        self.rates: list[float] = []
        """GB/s of the exchanges."""
        self.untried: list[str] = []
        """Exchanges for which no time was left, since the nodes are many or one of them hangs."""

    def run(self, supervisor: Supervisor, step: Callable[[Node, str, int], ProcessSpec]) -> dict[str, str]:
        """The bad nodes and what is wrong with them. `step` makes the step on one node, given the store's address and
        port."""
        from torch.distributed import TCPStore
        head = self.nodes[0].address
        store = TCPStore(head, 0, is_master=True, wait_for_workers=False)
        token = self.folder / f".preflight-{secrets.token_hex(4)}"
        token.touch()
        questions = {"token": str(token.absolute()), "gpus": self.gpus, "rounds": self.rounds,
                     "learners": self.reducers, "megabytes": 256 if self.gpus else 4, "seconds": self.seconds}
        store.set("questions", json.dumps(questions))
        specs = {node.name: step(node, head, store.port) for node in self.nodes}
        supervisor.start(list(specs.values()))
        try:
            return self._listen(store, supervisor, specs)
        finally:
            supervisor.end({spec.name for spec in specs.values()})
            supervisor.forget({spec.name for spec in specs.values()})
            token.unlink()

    def _listen(self, store: TCPStore, supervisor: Supervisor, specs: dict[str, ProcessSpec]) -> dict[str, str]:
        begin = time.monotonic()
        facts = self._collect(store, supervisor, "facts", self.tasks, begin + 0.6 * self.seconds)
        bad = self._judge_silence(facts, supervisor, specs) | judge_facts(facts, self.gpus)
        present = [name for name in self.names if name not in bad]
        store.set("present", json.dumps(present))
        paired = self._collect(store, supervisor, "paired", present, begin + 0.85 * self.seconds)
        bad |= judge_pairs(self._exchanges(store, set(present)), self.nodes[0].name)
        fit = not set(self.learner) & bad.keys()
        free = fit and paired.keys() >= set(self.learner)
        store.set("reduce", json.dumps(free))
        if free:
            done = self._collect(store, supervisor, "reduced", self.reducers, begin + self.seconds)
            bad |= judge_reduce({task: done.get(task, {"error": "no answer"}) for task in self.reducers})
        elif fit:
            self.untried.append("the all-reduce of the learner's nodes")
        return bad

    def _collect(self, store: TCPStore, supervisor: Supervisor, what: str, tasks: list[str],
                 deadline: float) -> dict[str, dict]:
        """The answers, by task, of those that gave one. Returns early when all have, or who has not is dead."""
        answers: dict[str, dict] = {}
        while True:
            dead = {name.removeprefix("preflight-") for name in supervisor.poll()}
            for task in set(tasks) - answers.keys():
                if store.check([f"{what}/{task}"]):
                    answer = json.loads(store.get(f"{what}/{task}") or "{}")
                    answers[task] = answer | {"seen": time.time()}
            waiting = [task for task in tasks if task not in answers and task.split("/")[0] not in dead]
            if not waiting or time.monotonic() > deadline:
                return answers
            time.sleep(POLL_SECONDS)

    def _judge_silence(self, facts: dict, supervisor: Supervisor, specs: dict[str, ProcessSpec]) -> dict[str, str]:
        silent = {task.split("/")[0] for task in self.tasks if task not in facts}
        return {name: f"did not answer; its log says: {last_words(supervisor.log_path(specs[name].name))[0]}"
                for name in sorted(silent)}

    def _exchanges(self, store: TCPStore, present: set[str]) -> dict[Pair, str | None]:
        """The error of each pair, None without. A pair of which one never began, since it was still busy with others,
        says nothing against either."""
        found = {}
        for number, pairs in enumerate(self.rounds):
            for pair in pairs:
                if not present.issuperset(pair):
                    continue
                keys = [f"pair/{number}/{name}" for name in pair]
                answers = [json.loads(store.get(key)) for key in keys if store.check([key])]
                errors = [answer["error"] for answer in answers if "error" in answer]
                self.rates += [answer["gb_s"] for answer in answers if "gb_s" in answer]
                begun = store.check([f"{exchange_name(number, pair)}/{name}" for name in pair])
                if errors or len(answers) == 2:
                    found[pair] = errors[0] if errors else None
                elif begun:
                    found[pair] = "no answer in time"
                else:
                    self.untried.append(" with ".join(pair))
        return found


def judge_facts(facts: dict[str, dict], gpus: int) -> dict[str, str]:
    """Bad nodes by what their tasks say of them."""
    bad: dict[str, str] = {}
    usual = Counter(tuple(said["gpus"]) for said in facts.values()).most_common(1)[0][0] if facts else ()
    for task, said in facts.items():
        name = task.split("/")[0]
        full = [f"{folder} ({free} GB)" for folder, free in said["free_gb"].items() if free < FREE_GB]
        if not said["visible"]:
            bad[name] = "does not see the run's folder: runs_dir must be on a file system that all nodes share"
        elif full:
            bad[name] = f"has less than {FREE_GB:.0f} GB free in {', '.join(full)}"
        elif abs(said["clock"] - said["seen"]) > CLOCK_SECONDS:
            bad[name] = f"its clock is {said['clock'] - said['seen']:+.1f} s off"
        elif tuple(said["gpus"]) != usual:
            bad[name] = f"has other GPUs than the rest: {_counted(said['gpus'])}, the others {_counted(usual)}"
        elif len(said["gpus"]) < gpus:
            bad[name] = f"has {len(said['gpus'])} GPUs, cluster.gpus_per_node={gpus}"
    return bad


def _counted(gpus) -> str:
    return " + ".join(f"{count} × {name}" for name, count in Counter(gpus).items()) or "none"


def judge_pairs(exchanges: dict[Pair, str | None], head: str) -> dict[str, str]:
    """Bad nodes by the exchanges that failed: the node in most of them, until all are explained."""
    bad: dict[str, str] = {}
    failed = {pair: error for pair, error in exchanges.items() if error}
    while failed:
        counts = Counter(name for pair in failed for name in pair)
        name = max(counts, key=lambda name: (counts[name], name != head))
        partners = sorted({other for pair in failed if name in pair for other in pair if other != name})
        error = next(error for pair, error in failed.items() if name in pair)
        bad[name] = f"exchanges no data with {', '.join(partners)}: {error}"
        failed = {pair: error for pair, error in failed.items() if name not in pair}
    return bad


def judge_reduce(answers: dict[str, dict]) -> dict[str, str]:
    """Bad nodes by the all-reduce: those that gave no answer, else all that say it failed."""
    errors = {task.split("/")[0]: answer["error"] for task, answer in answers.items() if "error" in answer}
    silent = {name: why for name, why in errors.items() if why == "no answer"}
    return {name: f"the all-reduce of the learner's nodes failed: {why}" for name, why in (silent or errors).items()}
