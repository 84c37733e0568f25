"""Rules that users add: checked, verified on shards before use."""

from meshwright.costmodel.user_rules.add import overload_of, rule, target_of, verified
from meshwright.costmodel.user_rules.verify import (
    TOLERANCES,
    Fault,
    Tensors,
    Trial,
    called,
    cut_dim,
    faults,
    first_line,
    meta_of,
    perform,
    random_operands,
)
