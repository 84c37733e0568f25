"""Plans: the contract with the executor; checked, laid out on ranks, put into words."""

from typing import TYPE_CHECKING

from meshwright.profiles.inputs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from meshwright.planner.decisions import OFFLOADS, PLACEMENTS, divisors
    from meshwright.planner.plan.assignments import Known, arriving_states, plan_assignments
    from meshwright.planner.plan.check import (
        check_plan,
        check_runs,
        fingerprint,
        why_not_late,
        why_stepped_late,
    )
    from meshwright.planner.plan.context_parallel import ulysses_degrees
    from meshwright.planner.plan.expert_legs import legs, refused
    from meshwright.planner.plan.expert_parallel import (
        check_blocks,
        check_experts_run,
        expert_weights,
        fewest_experts,
        folds,
        has_experts,
    )
    from meshwright.planner.plan.flow import (
        crossings,
        pipelines,
        sent_in_parts,
        shared_apart,
        stage_of,
        stages_of_parameters,
    )
    from meshwright.planner.plan.infeasible import (
        WAYS_OUT,
        InfeasibleError,
        Relaxation,
        without_ways_out,
    )
    from meshwright.planner.plan.loss_parts import (
        NO_LOGITS,
        graph_for,
        has_parts,
        in_parts,
        problem_in,
        with_loss_in,
    )
    from meshwright.planner.plan.offload import away_blocks, moved_parts, moved_sizes, off_device
    from meshwright.planner.plan.plan import (
        OuterLoop,
        Plan,
        StagePlan,
        recompute_of,
        segments_of,
        stage_on,
    )
    from meshwright.planner.plan.ranges import (
        PlanError,
        compress_names,
        compress_ranks,
        expand_names,
        expand_ranks,
    )
    from meshwright.planner.plan.ranks import placement_of
    from meshwright.planner.plan.servers import server_of, why_not_served, why_unserved
    from meshwright.planner.plan.shardings import express_shardings, glob, resolve_shardings
    from meshwright.planner.plan.slices import slices_at, tensor_multiple
    from meshwright.planner.plan.words import (
        GIB,
        counted,
        decision_words,
        describe,
        kept_together,
        layout_words,
        made_words,
        margin_beside,
        meeting_words,
        megatron_layout,
        mesh_words,
        peak_words,
        seconds,
        sized,
        slower,
        stage_layout,
    )

__getattr__, __all__ = lazy_exports(__name__, __file__)
