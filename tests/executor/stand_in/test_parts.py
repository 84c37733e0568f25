"""Parts that are made on demand are those that `fully_shard` cuts."""

from itertools import product

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param

from meshwright.executor.stand_in import Parts, parts_on_demand


def test_parts_are_those_of_fully_shard() -> None:
    for length, count, dim in product((0, 1, 5, 8, 9, 100), (1, 2, 3, 8), (0, 1)):
        whole = torch.arange(length * 2).view((length, 2) if dim == 0 else (2, length))
        cut = _fsdp_common._chunk_with_empty(whole, count, dim)
        parts = Parts(whole, count, dim)
        assert len(parts) == len(cut)
        for own, theirs in zip(parts, cut, strict=True):
            assert own.shape == theirs.shape
            assert torch.equal(own, theirs)
            assert own.untyped_storage().data_ptr() in (theirs.untyped_storage().data_ptr(), 0)


def test_only_inside_the_context() -> None:
    cut = _fsdp_param._chunk_with_empty
    with parts_on_demand():
        assert isinstance(_fsdp_param._chunk_with_empty(torch.empty(4), 2, dim=0), Parts)
    assert _fsdp_param._chunk_with_empty is cut
