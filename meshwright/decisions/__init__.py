"""What was asked and decided: a plan that is given is checked, also for batches of other shapes and
for the processes that are running."""

from meshwright.decisions.decision import Decision, Request
from meshwright.decisions.fp8 import check_products, check_units
from meshwright.decisions.given_plan import take_plan
from meshwright.decisions.shapes import OtherShapes
from meshwright.decisions.tf32 import in_tf32
from meshwright.decisions.world import check_world, one_at_a_time, why_not_here
