"""Drafts of plans: the space of choices, estimates and cuts of stages, and their price."""

from meshwright.planner.drafts.candidates import Candidate, PlanDraft, priced_fits
from meshwright.planner.drafts.combinations import (
    Combination,
    MeshChoice,
    StageDraft,
    StageSetup,
    Waiting,
)
from meshwright.planner.drafts.drafter import Drafter, Given
from meshwright.planner.drafts.equal_stages import EqualStages
from meshwright.planner.drafts.space import Space
from meshwright.planner.drafts.unequal import UnequalStages
