"""Damage to a learner's checkpoint, which torch.load would take for weights."""
from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sao_megatron.checkpoints import write_state
from sao_megatron.errors import UserError
from sao_megatron.learner import integrity


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two tensors and an object in one file."""
    torch.manual_seed(0)
    state = {"policy.a": torch.randn(40), "policy.b": torch.randn(3, 5), "critic": {"x": [1.5, "y"]}}
    save(state, tmp_path)
    return tmp_path


def save(state: dict, folder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a process without others saves alone
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def load(folder) -> dict:
    state = {"policy.a": torch.zeros(40), "policy.b": torch.zeros(3, 5)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def with_a_flipped_bit(path: Path, every: int) -> Iterator[None]:
    """The file with one bit flipped, in each `every`-th byte in turn."""
    whole = path.read_bytes()
    for position in range(0, len(whole), every):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        yield


def test_flipped_bits(folder):
    """If this fails, a flipped bit becomes a weight, and nobody notices; or a sound checkpoint is refused."""
    integrity.check(folder)
    path, = folder.glob("*.distcp")
    right, found = load(folder), 0
    for _ in with_a_flipped_bit(path, 17):
        try:
            integrity.check(folder)
        except UserError as error:
            found += 1
            assert path.name in str(error) and "are damaged" in str(error)
            continue
        try:  # what nobody notices changes nothing: headers that torch.load does not read, or refuses; padding
            now = load(folder)
        except (Exception, dcp.api.CheckpointException):
            continue
        assert all(torch.equal(now[name], tensor) for name, tensor in right.items())
    assert found > 50


@pytest.mark.parametrize("known", [True, False])
def test_flipped_bits_of_the_metadata(folder, known):
    """If this fails, a weight lands in another's place, because what says where it belongs was damaged; or, where no
    checksum is known, somebody gets a traceback."""
    if known:
        write_state(folder, {"metadata": integrity.metadata_checksum(folder)})
        integrity.check(folder)
    found = tried = 0
    for _ in with_a_flipped_bit(folder / ".metadata", 1 if known else 37):
        tried += 1
        try:
            integrity.check(folder)
        except UserError as error:
            found += 1
            assert "its .metadata is damaged (checksum" in str(error) or not known
    assert found == tried if known else found > 5


def test_a_share_and_a_part(folder):
    """If this fails, ranks leave a part of a checkpoint unread, or a conversion reads the optimizers."""
    path, = folder.glob("*.distcp")
    items = integrity.read_metadata(folder).storage_data
    of_a, = (info for index, info in items.items() if index.fqn == "policy.a")
    data = bytearray(path.read_bytes())
    data[of_a.offset:of_a.offset + of_a.length] = bytes(of_a.length)
    path.write_bytes(data)
    integrity.check(folder, "critic")
    with pytest.raises(UserError, match="the data of policy.a are damaged"):
        integrity.check(folder, "policy.")
    refused = 0
    for share in range(3):
        try:
            integrity.check(folder, share=share, shares=3)
        except UserError:
            refused += 1
    assert refused == 1


def test_truncated_and_missing(folder):
    """If this fails, somebody with half a checkpoint gets a traceback."""
    path, = folder.glob("*.distcp")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="are damaged"):
        integrity.check(folder)
    path.unlink()
    with pytest.raises(UserError, match="No such file"):
        integrity.check(folder)
    (folder / ".metadata").write_bytes(b"x")
    with pytest.raises(UserError, match="its .metadata cannot be read"):
        integrity.check(folder)
    write_state(folder, {"metadata": "12345678"})
    (folder / ".metadata").unlink()
    with pytest.raises(UserError, match="its .metadata cannot be read .*No such file"):
        integrity.check(folder)
