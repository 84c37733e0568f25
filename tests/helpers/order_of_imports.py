"""The rooms, packages or large modules, in the order of imports that
`tests/test_architecture.py` holds them to."""

from tests.helpers.source_files import PACKAGE

# A room imports rooms before it alone, and none of its own line.
ORDER = """
profiles.inputs
profiles.hardware
profiles.steps
profiles
profiles.measure
costmodel
costmodel.schedules
costmodel.rules
costmodel.user_rules
costmodel.sharding
costmodel.memory
costmodel.kernels
costmodel.operators
costmodel.blocks
costmodel.stages
planner
planner.operators
planner.tracing.values
planner.tracing.user_module
planner.tracing.similar
planner.tracing.leaves
planner.tracing.transformers
planner.tracing
planner.intra_op
planner.blocks
planner.plan
planner.inter_op
planner.pricing
planner.stages
planner.serving
planner.overrides planner.page
planner.report
planner.drafts
planner.bounds
planner.search
planner.alternatives
planner.frameworks
executor
executor.backward
executor.resharding
executor.context_attention
executor.lowering
executor.ranks
executor.parameters
executor.transfers
executor.stages
executor.runtime
executor.files
executor.checkpoint
executor.export
executor.stand_in executor.prices
executor.rehearsal
traced
monitor
decisions
running
data
shell
meshwright
selftest
shell.commands
training
hf
"""
POSITION = {
    package if package == PACKAGE else f"{PACKAGE}.{package}": position
    for position, line in enumerate(ORDER.split("\n"))
    for package in line.split()
}
