"""Sharding rules: one line per operator, in a language of named factors; special operators."""

from typing import TYPE_CHECKING

from meshwright.profiles.inputs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from meshwright.costmodel.rules.auto import VIEWS, is_pointwise
    from meshwright.costmodel.rules.language import (
        Dims,
        Kind,
        Misfit,
        OpFactors,
        divided,
        given_factors,
        overload,
        place_of,
        signature_of,
        words,
    )
    from meshwright.costmodel.rules.leaf import LEAF, LEAVES, RANDOM_LEAF, Leaf, Work, leaf_of
    from meshwright.costmodel.rules.moe import (
        EXPERT_FACTOR,
        TOKEN_FACTORS,
        copies_of,
        inside_experts,
    )
    from meshwright.costmodel.rules.registry import RuleError, UserRule, factors_of, named_in
    from meshwright.costmodel.rules.shuffle import PERMUTATIONS, permutation
    from meshwright.costmodel.rules.traits import (
        IMPLEMENTATIONS,
        LOSS_IN_PARTS,
        SCORES,
        TRAITS,
        Draw,
        Product,
        backward_joins,
        class_weights,
        draws,
        draws_anew,
        is_causal,
        is_narrow,
        recomputable,
        row_reduction,
        runs_as_reshape,
        tagged,
        takes_batch_statistics,
        traits_of,
        traits_of_target,
        updates_statistics,
    )

__getattr__, __all__ = lazy_exports(__name__, __file__)
