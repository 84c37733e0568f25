"""Requests and decisions: checks of a given plan, of other shapes of batches, of running ranks."""

from meshwright.decisions.decision import Decision, Request, made_now
from meshwright.decisions.given_plan import take_plan
from meshwright.decisions.precision import check_products, check_units, in_tf32
from meshwright.decisions.world import check_world, one_at_a_time, why_not_here
