"""The price of an operator on one rank: forward, backward, host, communication."""

from meshwright.costmodel.operators.communication import splits_batch
from meshwright.costmodel.operators.context import (
    backward_temporaries,
    context_exchange,
    reads_kept,
)
from meshwright.costmodel.operators.cost import (
    BACKWARD_S,
    COMPUTING,
    FORWARD_S,
    PASS_COLUMNS,
    Axis,
    Cost,
    Entry,
    Priced,
    total,
)
from meshwright.costmodel.operators.flops import ModelFlops, is_per_row, model_flops, op_flops
from meshwright.costmodel.operators.fusion import Fusion, fuse
from meshwright.costmodel.operators.local_call import signature
from meshwright.costmodel.operators.matrices import (
    ends_of,
    fullest,
    matrices_of,
    mean_moments,
    owners_of,
)
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.operators.products import attention, chunk_bytes
from meshwright.costmodel.operators.setting import Problem, Setting
from meshwright.costmodel.operators.sizes import LocalSizes
