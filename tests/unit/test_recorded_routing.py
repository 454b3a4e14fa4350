"""Recorded routing on its way from the engine's reply through builder and store to a micro-batch."""
import base64

import numpy as np
import pytest

from sao_megatron.engine.reply import read_generation
from sao_megatron.errors import UserError
from sao_megatron.trajectory.packing import pack
from sao_megatron.trajectory.recorded import find_store
from sao_megatron.trajectory.routing import Routing, pick, runs
from sao_megatron.trajectory.store import Store
from sao_megatron.trajectory.types import Trajectory, TrajectoryBuilder, decode, encode


def reply(rows: int, spans=((0, 4),), retractions=0, **changes) -> dict:
    """Four tokens sampled behind a prompt of three; the experts of row i are 2·i and 2·i + 1."""
    experts = np.arange(rows * 2, dtype="<i4")
    meta = {"finish_reason": {"type": "length", "length": 4}, "prompt_tokens": 3, "num_retractions": retractions,
            "output_token_logprobs": [[-1.0, 5, None]] * 4,
            "routed_experts": base64.b64encode(experts.tobytes()).decode(),
            "weight_versions": [{"version": str(i), "start": a, "end": b} for i, (a, b) in enumerate(spans)]}
    return {"output_ids": [5, 6, 7, 8], "meta_info": meta | changes}


# If one fails, tokens are replayed with the routing of other weights, or good records are thrown away.
@pytest.mark.parametrize(("start", "spans", "retractions", "recorded"), [
    (0, [(0, 4)], 0, [1, 1, 1, 1, 1, 1]),
    (2, [(0, 4)], 0, [1, 1, 1, 1]),
    (0, [(0, 2), (2, 4)], 0, [1, 1, 1, 1, 1, 1]),  # in place: nothing was computed anew
    (0, [(0, 2), (2, 4)], 1, [0, 0, 0, 0, 1, 1]),  # row 4 sampled token 5, the first of the new version
    (0, [(0, 1), (1, 3), (3, 4)], 2, [0, 0, 0, 0, 0, 1]),
    (2, [(0, 1), (1, 4)], 1, [0, 1, 1, 1]),
    (0, [(0, 4)], 1, [0, 0, 0, 0, 0, 0]),  # for lack of memory: nobody knows when
    (2, [(0, 2), (2, 4)], 2, [0, 0, 0, 0]),
])
def test_rows_behind_the_last_retraction_are_recorded(start, spans, retractions, recorded):
    routing = read_generation(reply(6 - start, spans, retractions), routing_from=start).routing
    assert routing.recorded.tolist() == list(map(bool, recorded))
    assert routing.experts.tolist() == [[2 * i, 2 * i + 1] for i in range(6 - start)]


# If this fails, an engine that was started without its flag, or answers other rows, is not found out.
def test_replies_without_the_rows_are_refused():
    for changes, fault in [({"routed_experts": ""}, "0 routed experts do not answer 6"),
                           ({"routed_experts": base64.b64encode(bytes(4 * 13)).decode()}, "13 routed experts")]:
        with pytest.raises(ValueError, match=fault):
            read_generation(reply(6) | {"meta_info": reply(6)["meta_info"] | changes}, routing_from=0)
    without = reply(6)
    del without["meta_info"]["routed_experts"]
    with pytest.raises(ValueError, match="--enable-return-routed-experts"):
        read_generation(without, routing_from=0)
    assert read_generation(without).routing is None


def rows(first: int, count: int, top: int = 0) -> Routing:
    """Row i has the experts i and i + 100 + top."""
    ids = np.arange(first, first + count)
    experts = np.stack([ids, ids + 100 + top], 1).astype(np.int16 if top else np.uint8)
    return Routing(experts, ids % 5 != 3)


def recorded_trajectory(top: int = 0):
    """Two turns: prompt 0 1 2, actions 3 4, an empty abort, observation 5, actions 6 7, observation 8."""
    builder = TrajectoryBuilder([9] * 3, "p", "t", record_routing=True)
    for action, observation in [(2, 1), (2, 1)]:
        wanted = builder.wanted_routing()["routing_from"]
        builder.add_action([], [], [])  # aborted before it ran
        builder.add_action([4] * action, [-1.0] * action, [0] * action,
                           rows(wanted, len(builder.tokens) + action - 1 - wanted, top))
        builder.add_observation([5] * observation)
    builder.add_reward(1.0)
    return builder.build()


# If this fails, a token is replayed with its neighbour's experts, or the store changes or inflates them.
@pytest.mark.parametrize(("top", "width"), [(0, 1), (300, 2)])
def test_builder_and_store_keep_each_row_at_its_token(tmp_path, top, width):
    before = recorded_trajectory(top)
    with Store(tmp_path / "store.sqlite") as store:
        store.append(before, 0)
        [after] = store.lease(1, "me", 0)
    for t in (before, after):
        assert t.routing.experts.itemsize == width
        assert t.routing.recorded.tolist() == [True, True, True, False, True, True, True, False, False]
        assert t.routing.experts[:7].tolist() == [[i, i + 100 + top] for i in range(7)]
    plain = recorded_trajectory()
    plain.routing = None
    # one byte a token says whether it is recorded; the header holds width and dtype
    assert len(encode(before)) - len(encode(plain)) < 9 * (2 * width + 1) + 40
    assert decode(encode(plain)).routing is None


# If this fails, the tokens of a rewritten context are replayed with the experts of the context before it.
def test_rows_of_a_segment_count_from_its_beginning():
    builder = TrajectoryBuilder([9] * 3, "p", "t", record_routing=True)
    for prompt in (None, 4, 1):
        if prompt:
            builder.add_segment(TrajectoryBuilder([9] * prompt, "p", "t", record_routing=True))
        assert builder.wanted_routing() == {"routing_from": 0}
        builder.add_action([4, 4], [-1.0] * 2, [0] * 2, rows(0, len(builder.segment_tokens) + 1))
    trajectory = decode(encode(builder.build()))
    wanted = [True, True, True, False, False] + [True, True, True, False, True, False] + [True, True, False]
    assert trajectory.routing.recorded.tolist() == wanted  # rows() leaves out the fourth
    assert trajectory.routing.experts[wanted, 0].tolist() == [0, 1, 2, 0, 1, 2, 4, 0, 1]
    packed = pack([trajectory], packed_length=24, sequence_multiple=4)
    assert np.flatnonzero(packed.real).tolist() == [*range(5), *range(8, 14), *range(16, 19)]
    assert packed.origin[packed.real].tolist() == list(range(14))


# If this fails, turns that a dead controller sampled are replayed with the experts of a later prefill.
def test_an_action_without_routing_never_gets_any():
    builder = TrajectoryBuilder([9] * 3, "p", "t", record_routing=True)
    builder.add_action([4, 4], [-1.0] * 2, [0] * 2)
    builder.add_observation([5])
    assert builder.wanted_routing() == {"routing_from": 4}
    builder.add_action([4, 4], [-1.0] * 2, [0] * 2, rows(4, 3))
    assert builder.build().routing.recorded.tolist() == [False] * 4 + [True] * 3 + [False]


# If this fails, a replay that asks for recorded routing trains without any.
def test_a_store_without_routing_is_refused(tmp_path):
    for name, record in (("with", True), ("without", False)):
        trajectory = recorded_trajectory()
        if not record:
            trajectory.routing = None
        with Store(tmp_path / name) as store:
            store.append(trajectory, 0)
    assert find_store(tmp_path / "with", 1, routing=True) == tmp_path / "with"
    assert find_store(tmp_path / "without", 1) == tmp_path / "without"
    with pytest.raises(UserError, match=r"rollout.routing_replay=true: .*without was recorded without routing"):
        find_store(tmp_path / "without", 1, routing=True)


# If this fails, a lost or doubled row shifts all later ones.
def test_rows_that_do_not_fit_are_refused():
    builder = TrajectoryBuilder([9] * 3, "p", "t", record_routing=True)
    with pytest.raises(ValueError, match="3 rows of routing came for the 4 tokens from 0"):
        builder.add_action([4, 4], [-1.0] * 2, [0] * 2, rows(0, 3))
    broken = recorded_trajectory()
    broken.routing = rows(0, 4)
    with pytest.raises(ValueError, match="routing has 4 rows, expected 9"):
        Trajectory(**vars(broken))
    with pytest.raises(ValueError, match=r"expected \(rows, layers·k\)"):
        Routing(np.zeros((3, 2), np.uint8), np.ones(2, bool))


# If this fails, a rank gets the routing of other tokens or layers than it asked for.
def test_what_a_rank_asks_for_is_picked():
    wide = recorded_trajectory(300)
    parts, starts = [recorded_trajectory().routing, None, wide.routing], np.array([0, 9, 14, 23])
    rows = np.array([2, 1, 20, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15])
    assert runs(rows).tolist() == [[2, 3], [1, 2], [20, 21], [6, 16]]
    assert runs(rows[:0]).tolist() == []
    both = pick(parts, starts, runs(rows), [slice(1, 2), slice(0, 1)], np.int16)  # of two runs of layers
    assert both.experts[both.recorded].tolist() == [[102, 2], [101, 1], [406, 6], [106, 6], [400, 0], [401, 1]]
    picked = pick(parts, starts, runs(rows), [slice(1, 2)], np.int16)
    assert picked.recorded.tolist() == [True] * 4 + [False] * 7 + [True] * 2  # a last token has none, nor has None
    assert picked.experts[picked.recorded].tolist() == [[102], [101], [406], [106], [400], [401]]
