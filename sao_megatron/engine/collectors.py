"""SGLang's metrics without a series for each priority.

Upstream fault (sgl-project/sglang, issue 20814; 0.5.23 has it): with --enable-priority-scheduling every number that was
ever a request's priority becomes a label of its metrics and is never forgotten. Ours are those of episodes, all
different: after 20,000 of them /metrics took 2.6 s, in which the server answered nobody, and the scheduler went through
all of them at every batch. SGLang takes other collectors through ServerArgs.stat_loggers; these count all priorities as
one, as its own do without priorities.
"""
from __future__ import annotations

from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector, TokenizerMetricsCollector


class SchedulerMetrics(SchedulerMetricsCollector):
    def _log_gauge_queue_count(self, gauge, data) -> None:
        self._log_gauge(gauge, data.total)


def _of_all_priorities(name: str):
    observe = getattr(TokenizerMetricsCollector, name)
    return lambda self, labels, *values, **more: observe(self, labels | {"priority": ""}, *values, **more)


class TokenizerMetrics(TokenizerMetricsCollector):
    observe_one_finished_request = _of_all_priorities("observe_one_finished_request")
    observe_one_aborted_request = _of_all_priorities("observe_one_aborted_request")
    observe_time_to_first_token = _of_all_priorities("observe_time_to_first_token")
    observe_inter_token_latency = _of_all_priorities("observe_inter_token_latency")


COLLECTORS = {"scheduler": SchedulerMetrics, "tokenizer": TokenizerMetrics}
