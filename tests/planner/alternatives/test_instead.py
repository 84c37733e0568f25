"""What an operator could do instead, in a step of all its micro-batches."""

from dataclasses import replace

from meshwright.planner.alternatives.explained import Explained, instead
from meshwright.planner.pricing.evaluate import Evaluator
from tests.helpers.planning import cluster, problem_of
from tests.helpers.tiny import cut, net, plan_for
from tests.models.models import Traced


def explained(microbatches: int) -> Explained:
    graph, table = cut(net())
    plan = plan_for(graph, dp=1, tp=2)
    plan = replace(plan, num_microbatches=microbatches, global_batch_size=8 * microbatches)
    problem = problem_of(Traced(graph=graph, table=table), cluster(2), "fp32")
    (found,) = instead(Evaluator(problem).price(plan), problem, "layers.1.up")
    return found


def test_calls_and_seconds_are_of_all_micro_batches() -> None:
    two, four = (explained(m) for m in (2, 4))
    calls = [
        {way.strategy: {kind: n for kind, (n, _) in way.collectives.items()} for way in own.others}
        for own in (two, four)
    ]
    assert {kind: 2 * n for kind, n in calls[0]["colwise"].items()} == calls[1]["colwise"] != {}
    chosen = two.chosen.seconds, four.chosen.seconds
    assert chosen[0] and chosen[1] and 1.5 < chosen[1] / chosen[0] <= 2
