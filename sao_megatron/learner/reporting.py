"""What rank 0 tells of each step: to the records and writers, which write it in a thread of their own while the learner
goes on, to the alarms, and through the store to pacing and the launcher."""
from __future__ import annotations

import logging

from sao_megatron.config import RunConfig
from sao_megatron.errors import RunError
from sao_megatron.run_folder import RunFolder
from sao_megatron.telemetry.alarms import Alarms
from sao_megatron.telemetry.beside import Beside
from sao_megatron.telemetry.records import Recorded, Recorder
from sao_megatron.telemetry.slowing import Slowing
from sao_megatron.telemetry.statistics import Statistics
from sao_megatron.telemetry.writers import open_writers
from sao_megatron.trajectory.store import ALARMS, MAX_LAG, STOPPED, Store

log = logging.getLogger("learner")
MOST_ALARMS = 100
"""Sentences that the store keeps for the launcher."""


class Reporter:
    """The alarms remember the steps that the store has recorded, so a learner that goes on knows what the one before it
    knew."""

    def __init__(self, config: RunConfig, folder: RunFolder, store: Store, first_step: int):
        self.config, self.folder, self.store = config, folder, store
        self.alarms, self.slowing = Alarms(config.alarms, config.rollout.max_lag), Slowing(config.rollout.max_lag)
        earlier = [(row.step, row.metrics) for row in store.steps()]
        for _, metrics in earlier:
            self._check(metrics)
        self.writers = open_writers(config, folder, first_step, earlier)
        self.recorder = Recorder(folder.tokens_dir, config.tokens.limit_mb,
                                 folder.model_dir(config) / "tokenizer.json")
        self._beside = Beside()
        store.set_state(MAX_LAG, self.slowing.admitted)
        store.set_state(ALARMS, [alarm for alarm in store.get_state(ALARMS, []) if alarm[0] < first_step])

    def pacing(self) -> dict[str, float]:
        """What bounds the lag now; nothing where recorded trajectories are trained again."""
        return {"pacing/max_lag": self.slowing.admitted} if self.config.mode == "train" else {}

    def step(self, step: int, version: int, metrics: dict[str, float], statistics: Statistics,
             recorded: list[Recorded]) -> None:
        """After the store has recorded the step; `version` is the learner's before it. Raises RunError where an alarm
        ends the run, and what writing an earlier step raised."""
        self._beside.call(self._write, step, version, metrics, statistics, recorded)
        before = self.slowing.admitted
        sentences = self._check(metrics)
        if self.slowing.admitted != before:
            raised = ", ".join(sorted(self.alarms.raised))
            log.warning("pacing admits lag %d from now on, it was %d (%s)", self.slowing.admitted, before,
                        f"alarms: {raised}" if raised else "no alarm is raised")
            self.store.set_state(MAX_LAG, self.slowing.admitted)
        for sentence in sentences:
            self._say(step, sentence)

    def _write(self, step: int, version: int, metrics: dict[str, float], statistics: Statistics,
               recorded: list[Recorded]) -> None:
        self.recorder.write(step, version, recorded)
        for writer in self.writers:
            writer.write(step, metrics, statistics, recorded)

    def settle(self) -> None:
        """Return when all steps so far are written, as they must be before a checkpoint makes them final."""
        self._beside.wait()

    def _check(self, metrics: dict[str, float]) -> list[str]:
        """The sentences of the alarms that a step raises; pacing follows them where alarms.on_alarm=slow."""
        sentences = self.alarms.check(metrics)
        if self.config.alarms.on_alarm == "slow":
            self.slowing.step(self.alarms.raised)
        return sentences

    def _say(self, step: int, sentence: str) -> None:
        log.warning("alarm at step %d: %s", step, sentence)
        self.store.set_state(ALARMS, [*self.store.get_state(ALARMS, []), [step, sentence]][-MOST_ALARMS:])
        for writer in self.writers:
            self._beside.call(writer.alarm, step, sentence)
        if self.config.alarms.on_alarm == "stop":
            self.close()
            self.store.set_state(STOPPED, sentence)
            raise RunError(f"stopped by an alarm at step {step} (alarms.on_alarm=stop): {sentence}")
        if self.config.alarms.on_alarm == "pause":
            self.folder.paused_path.write_text(f"step {step}: {sentence}\n")

    def close(self) -> None:
        """May be called again."""
        writers, self.writers = self.writers, []
        self._beside.wait()
        for writer in writers:
            writer.close()
