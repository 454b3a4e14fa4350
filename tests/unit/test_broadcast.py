"""What of a publication needs no engine: how owners take turns, and how tensors are cut into buckets."""
import threading
import time

import pytest
import torch
from torch.distributed import TCPStore

from sao_megatron.errors import RunError
from sao_megatron.weights.broadcast import Turns, cut


def turns(count: int, timeout: float) -> list[Turns]:
    """Of `count` ranks: each has a connection of its own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [Turns(store, timeout)] + [
        Turns(TCPStore("127.0.0.1", store.port, wait_for_workers=False), timeout) for _ in range(count - 1)]


# If this fails, two owners send at once, and two engines can wait for each other for ever.
def test_owners_take_turns():
    sending, most, done = [], [], []
    ranks = turns(3, 30.0)  # the first holds the store: it must outlive the others

    def owner(rank: int, mine: Turns) -> None:
        for _ in range(5):
            with mine.turn(f"rank {rank}") as useful:
                sending.append(rank)
                most.append(len(sending))
                time.sleep(0.002)
                sending.remove(rank)
                done.append(useful)

    threads = [threading.Thread(target=owner, args=item) for item in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [True] * 15 and set(most) == {1}


# If this fails, a sender that hangs holds all others for ever, or the error does not say which rank it is.
def test_a_turn_has_a_deadline():
    first, second = turns(2, 0.2)
    with first.turn("rank 0, bucket 3"), pytest.raises(RunError, match="rank 1 waited 0 s .* behind rank 0, bucket 3"):
        with second.turn("rank 1"):
            pass


# If this fails, owners go on sending for a publication that has failed already, each up to its deadline.
def test_after_a_failure_nobody_sends():
    first, second = turns(2, 5.0)
    with pytest.raises(ValueError), first.turn("rank 0"):
        raise ValueError
    with second.turn("rank 1") as useful:
        assert useful is False


# If this fails, a bucket is larger than the memory that the recipe gives it, or a tensor is lost at a border.
def test_buckets():
    tensors = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (4, 4, 3, 20, 1, 9)]
    buckets = list(cut(iter(tensors), 10))
    assert [[name for name, _ in bucket] for bucket in buckets] == [["4", "4"], ["3"], ["20"], ["1", "9"]]


# If this fails, engines keep old weights in the attention of DeepSeek, Kimi and GLM-5, under success messages.
def test_what_an_engine_fuses_is_not_cut_apart():
    names = [f"model.layers.{layer}.self_attn.{name}.weight" for layer in (0, 1)
             for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")]
    buckets = [[name for name, _ in bucket] for bucket in
               cut(((name, torch.zeros(4, dtype=torch.uint8)) for name in names), 8)]
    assert sorted(name for bucket in buckets for name in bucket) == sorted(names)
    assert [names[0], names[2]] in buckets and [names[4], names[6]] in buckets
