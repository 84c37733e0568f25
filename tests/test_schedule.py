"""Schedules and their simulation, against closed forms and a demand-driven longest path.

All times are whole numbers of seconds, so sums are exact and times are compared with ==.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise
from time import process_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.schedule import SCHEDULES, Action, Instruction, build_schedule, in_flight
from costmodel.simulate import Event, StageTimes, Timeline, simulate

F, B = Action.FORWARD, Action.BACKWARD
Edges = list[tuple[int, int]]
Pipeline = tuple[list[tuple[int, int]], dict[tuple[int, int], int]]  # (F, B) times, transfers

names = st.sampled_from(sorted(SCHEDULES))
counts = st.integers(1, 7)
seconds = st.integers(0, 9)


def chain(num_stages: int) -> Edges:
    return list(pairwise(range(num_stages)))


def stage_times(forward: int, backward: int, reduce: int = 0, optimizer: int = 0) -> StageTimes:
    return StageTimes(
        forward_s=forward, backward_s=backward, reduce_s=reduce, optimizer_s=optimizer
    )


def run(
    name: str,
    times: Sequence[tuple[int, ...]],
    num_microbatches: int,
    transfers: dict[tuple[int, int], int] | None = None,
) -> Timeline:
    if transfers is None:
        transfers = dict.fromkeys(chain(len(times)), 0)
    streams = build_schedule(
        name, num_stages=len(times), num_microbatches=num_microbatches, edges=list(transfers)
    )
    return simulate(streams, [stage_times(*each) for each in times], transfers)


@st.composite
def stage_graphs(draw: st.DrawFn) -> tuple[int, Edges]:
    """A number of stages and any set of forward edges between them, the chain included or not."""
    num_stages = draw(counts)
    possible = list(combinations(range(num_stages), 2))
    edges = draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []
    return num_stages, edges


uneven = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6)


# --- streams ---------------------------------------------------------------------------------


def test_the_streams_of_a_small_1f1b_read_as_drawn() -> None:
    streams = build_schedule("1f1b", num_stages=2, num_microbatches=2)
    assert [" ".join(map(str, stream)) for stream in streams] == [
        "F0 sendF0->1 F1 sendF1->1 recvB0<-1 B0 recvB1<-1 B1 reduce",
        "recvF0<-0 F0 B0 sendB0->0 recvF1<-0 F1 B1 sendB1->0 reduce",
    ]


@given(name=names, graph=stage_graphs(), m=counts)
def test_each_stage_computes_every_microbatch_once_forward_then_backward(
    name: str, graph: tuple[int, Edges], m: int
) -> None:
    p, edges = graph
    for stage, stream in enumerate(
        build_schedule(name, num_stages=p, num_microbatches=m, edges=edges)
    ):
        assert all(each.stage == stage for each in stream)
        order = [(each.action, each.microbatch) for each in stream if each.action in (F, B)]
        assert sorted(order) == sorted((action, k) for action in (F, B) for k in range(m))
        assert all(order.index((F, k)) < order.index((B, k)) for k in range(m))
        reduces = [at for at, each in enumerate(stream) if each.action is Action.REDUCE_GRADIENTS]
        assert reduces == [len(stream) - 1]


@given(name=names, graph=stage_graphs(), m=counts)
def test_inputs_arrive_just_before_and_results_leave_just_after_their_compute(
    name: str, graph: tuple[int, Edges], m: int
) -> None:
    p, edges = graph
    for stage, stream in enumerate(
        build_schedule(name, num_stages=p, num_microbatches=m, edges=edges)
    ):
        sources = [i for i, j in sorted(edges) if j == stage]
        destinations = [j for i, j in sorted(edges) if i == stage]
        expected: list[tuple[Action, int, int | None]] = []
        for each in stream:
            k = each.microbatch
            if each.action is F:
                expected += [(Action.RECV_ACTIVATION, k, i) for i in sources]
                expected += [(F, k, None)]
                expected += [(Action.SEND_ACTIVATION, k, j) for j in destinations]
            elif each.action is B:
                expected += [(Action.RECV_GRADIENT, k, j) for j in destinations]
                expected += [(B, k, None)]
                expected += [(Action.SEND_GRADIENT, k, i) for i in sources]
        assert [(each.action, each.microbatch, each.peer) for each in stream[:-1]] == expected


@given(name=names, graph=stage_graphs(), m=counts)
def test_both_ends_of_a_channel_list_the_same_microbatches_in_the_same_order(
    name: str, graph: tuple[int, Edges], m: int
) -> None:
    p, edges = graph
    sent: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    received: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for stream in build_schedule(name, num_stages=p, num_microbatches=m, edges=edges):
        for each in stream:
            match each.action:
                case Action.SEND_ACTIVATION | Action.SEND_GRADIENT:
                    forward = each.action is Action.SEND_ACTIVATION
                    sent[each.stage, each.peer, forward].append(each.microbatch)
                case Action.RECV_ACTIVATION | Action.RECV_GRADIENT:
                    forward = each.action is Action.RECV_ACTIVATION
                    received[each.peer, each.stage, forward].append(each.microbatch)
    assert sent == received
    assert set(sent) == {(i, j, True) for i, j in edges} | {(j, i, False) for i, j in edges}
    assert all(sorted(order) == list(range(m)) for order in sent.values())


@given(name=names, p=counts, m=counts)
def test_in_flight_is_the_peak_of_walking_the_stream(name: str, p: int, m: int) -> None:
    for stage, stream in enumerate(build_schedule(name, num_stages=p, num_microbatches=m)):
        held = peak = 0
        for each in stream:
            held += (each.action is F) - (each.action is B)
            peak = max(peak, held)
        assert in_flight(name, stage=stage, num_stages=p, num_microbatches=m) == peak


def test_a_single_stage_only_computes_and_reduces() -> None:
    (stream,) = build_schedule("1f1b", num_stages=1, num_microbatches=2)
    assert " ".join(map(str, stream)) == "F0 B0 F1 B1 reduce"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "zigzag"}, "'zigzag'.*1f1b, gpipe"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"edges": [(1, 0)]}, r"edge \(1, 0\)"),
        ({"edges": [(0, 0)]}, r"edge \(0, 0\)"),
        ({"edges": [(0, 2)]}, r"edge \(0, 2\).*< 2"),
    ],
)
def test_a_schedule_that_cannot_be_says_why(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"name": "gpipe", "num_stages": 2, "num_microbatches": 2}
    with pytest.raises(ValueError, match=message):
        build_schedule(**(arguments | change))


def test_in_flight_rejects_unknown_names_and_stages() -> None:
    with pytest.raises(ValueError, match="known schedules are 1f1b, gpipe"):
        in_flight("zigzag", stage=0, num_stages=2, num_microbatches=2)
    with pytest.raises(ValueError, match="stage=2"):
        in_flight("1f1b", stage=2, num_stages=2, num_microbatches=2)


def test_only_sends_and_receives_have_a_peer() -> None:
    with pytest.raises(ValueError, match="peer=None"):
        Instruction(action=Action.SEND_GRADIENT, stage=1, microbatch=0)
    with pytest.raises(ValueError, match="peer=1"):
        Instruction(action=F, stage=0, microbatch=0, peer=1)


# --- closed forms ----------------------------------------------------------------------------


@given(name=names, p=counts, m=counts, forward=st.integers(1, 9), backward=st.integers(1, 9))
def test_equal_stages_take_the_textbook_time(
    name: str, p: int, m: int, forward: int, backward: int
) -> None:
    timeline = run(name, [(forward, backward)] * p, m)
    assert timeline.step_time_s == timeline.pipeline_s == (m + p - 1) * (forward + backward)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.busy_s == (m * (forward + backward),) * p
    assert all(timeline.idle_s(s) == (p - 1) * (forward + backward) for s in range(p))


@given(times=uneven, m=counts)
def test_gpipe_of_uneven_stages_fills_and_then_waits_for_the_slowest(
    times: list[tuple[int, int]], m: int
) -> None:
    """Σ t + (m-1)(max F + max B): Alpa's formula only if one stage has both maxima."""
    slowest = max(f for f, _ in times) + max(b for _, b in times)
    assert run("gpipe", times, m).step_time_s == sum(map(sum, times)) + (m - 1) * slowest


@given(times=uneven, m=counts)
def test_1f1b_of_uneven_stages_is_between_its_busiest_stage_and_gpipe(
    times: list[tuple[int, int]], m: int
) -> None:
    step_time_s = run("1f1b", times, m).step_time_s
    assert step_time_s <= run("gpipe", times, m).step_time_s
    latency = [f + b for f, b in times]
    assert step_time_s >= max(sum(latency[:k]) + m * latency[k] for k in range(len(times)))


@given(forwards=st.lists(seconds, min_size=1, max_size=6), m=counts)
def test_alpas_formula_bounds_1f1b_of_proportional_stages(forwards: list[int], m: int) -> None:
    """With B = 2F everywhere, it is too high by at most the stages after the slowest."""
    times = [(f, 2 * f) for f in forwards]
    latency = [3 * f for f in forwards]
    alpa_s = sum(latency) + (m - 1) * max(latency)
    after_slowest_s = sum(latency[latency.index(max(latency)) + 1 :])
    assert run("gpipe", times, m).step_time_s == alpa_s
    assert alpa_s - after_slowest_s <= run("1f1b", times, m).step_time_s <= alpa_s


def test_alpas_formula_can_be_wrong_both_ways_for_1f1b() -> None:
    # Too high: the first stage never waits for the quick second one.
    assert run("1f1b", [(4, 4), (1, 1)], 8).step_time_s == 64 < (8 + 2) + 7 * 8
    # Too low: one stage is slow forward and another backward.
    assert run("1f1b", [(10, 0), (0, 10), (0, 0)], 2).step_time_s == 40 > 20 + 10


@st.composite
def chains_with_transfers(draw: st.DrawFn) -> Pipeline:
    times = draw(uneven)
    return times, {edge: draw(seconds) for edge in chain(len(times))}


@given(case=chains_with_transfers(), m=counts)
def test_gpipe_hides_transfers_behind_computes_once_filled(case: Pipeline, m: int) -> None:
    times, transfers = case
    slowest_forward = max([f for f, _ in times] + list(transfers.values()))
    slowest_backward = max([b for _, b in times] + list(transfers.values()))
    fill_s = sum(map(sum, times)) + 2 * sum(transfers.values())
    expected_s = fill_s + (m - 1) * (slowest_forward + slowest_backward)
    assert run("gpipe", times, m, transfers).step_time_s == expected_s


@given(case=chains_with_transfers(), rounds=st.integers(1, 3))
def test_1f1b_pays_a_round_trip_per_p_microbatches(case: Pipeline, rounds: int) -> None:
    times, transfers = case
    round_trip_s = sum(map(sum, times)) + 2 * sum(transfers.values())
    step_time_s = run("1f1b", times, rounds * len(times), transfers).step_time_s
    assert step_time_s >= rounds * round_trip_s


# --- any schedule, any graph -----------------------------------------------------------------


def longest_path_s(
    name: str, times: list[tuple[int, int]], m: int, transfers: dict[tuple[int, int], int]
) -> int:
    """When the last compute ends, asked backwards from the end of each stage."""
    orders = [SCHEDULES[name](stage, len(times), m) for stage in range(len(times))]
    position = [{compute: at for at, compute in enumerate(order)} for order in orders]

    @cache
    def end_s(action: Action, stage: int, k: int) -> int:
        at = position[stage][action, k]
        after = [0]
        if at > 0:
            previous_action, previous_k = orders[stage][at - 1]
            after.append(end_s(previous_action, stage, previous_k))
        for i, j in transfers:
            if (j if action is F else i) == stage:
                after.append(arrival_s(action, i, j, k))
        return max(after) + times[stage][0 if action is F else 1]

    @cache
    def arrival_s(action: Action, i: int, j: int, k: int) -> int:
        """Of message k on the channel; all schedules here send in the order of k."""
        sent_s = end_s(action, i if action is F else j, k)
        free_s = arrival_s(action, i, j, k - 1) if k else 0
        return max(sent_s, free_s) + transfers[i, j]

    return max(end_s(action, s, k) for s, order in enumerate(orders) for action, k in order)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    num_stages, edges = draw(stage_graphs())
    times = [(draw(seconds), draw(seconds)) for _ in range(num_stages)]
    return times, {edge: draw(seconds) for edge in edges}


@given(name=names, case=pipelines(), m=counts)
def test_any_stage_graph_finishes_when_its_longest_path_does(
    name: str, case: Pipeline, m: int
) -> None:
    times, transfers = case
    timeline = run(name, times, m, transfers)
    assert timeline.pipeline_s == longest_path_s(name, times, m, transfers)
    assert 0 <= timeline.bubble_fraction <= 1


@given(name=names, case=pipelines(), m=counts)
def test_a_track_does_one_thing_at_a_time(name: str, case: Pipeline, m: int) -> None:
    times, transfers = case
    tracks: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in run(name, times, m, transfers).events:
        tracks[event.stage, event.track].append(event)
    for events in tracks.values():
        spans = sorted((event.start_s, event.end_s) for event in events)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for i, j in transfers:
        assert [e.microbatch for e in tracks[i, f"sendF->{j}"]] == list(range(m))
        assert [e.microbatch for e in tracks[j, f"sendB->{i}"]] == list(range(m))


def test_the_step_ends_with_the_last_reduction_and_optimizer() -> None:
    # Stage 1 ends its last backward at 7, two seconds before stage 0.
    timeline = run("gpipe", [(1, 2, 1, 1), (1, 2, 2, 3)], 2)
    assert timeline.pipeline_s == 9
    ends = {(e.stage, e.name): e.end_s for e in timeline.events if e.microbatch is None}
    assert ends == {(0, "reduce"): 10, (0, "optimizer"): 11, (1, "reduce"): 9, (1, "optimizer"): 12}
    assert timeline.step_time_s == 12
    assert timeline.busy_s == (6, 6)


def test_a_large_pipeline_is_simulated_in_a_moment() -> None:
    streams = build_schedule("1f1b", num_stages=16, num_microbatches=256)
    start_s = process_time()
    timeline = simulate(streams, [stage_times(1, 2)] * 16, dict.fromkeys(chain(16), 0))
    assert process_time() - start_s < 1.0  # some 0.1 s; the room is for slow machines
    assert timeline.step_time_s == (256 + 15) * 3


# --- streams that are wrong ------------------------------------------------------------------


def instruction(
    action: Action, stage: int, microbatch: int, peer: int | None = None
) -> Instruction:
    return Instruction(action=action, stage=stage, microbatch=microbatch, peer=peer)


def play(*streams: list[Instruction]) -> Timeline:
    return simulate(streams, [stage_times(1, 1)] * len(streams), {(0, 1): 0})


def test_a_deadlock_names_who_waits_for_what() -> None:
    first = (Action.RECV_GRADIENT, Action.SEND_ACTIVATION)
    second = (Action.RECV_ACTIVATION, Action.SEND_GRADIENT)
    with pytest.raises(ValueError, match="stage 0 in recvB0<-1, stage 1 in recvF0<-0"):
        play(
            [instruction(action, 0, 0, 1) for action in first],
            [instruction(action, 1, 0, 0) for action in second],
        )


def test_channel_ends_that_disagree_are_refused() -> None:
    sends = [instruction(Action.SEND_ACTIVATION, 0, k, 1) for k in (0, 1)]
    receives = [instruction(Action.RECV_ACTIVATION, 1, k, 0) for k in (1, 0)]
    with pytest.raises(ValueError, match=r"expects recvF1<-0.*micro-batch 0"):
        play(sends, receives)
    with pytest.raises(ValueError, match="never receives sendF1 of stage 0"):
        play(sends, receives[1:])


def test_missing_and_impossible_times_are_refused() -> None:
    streams = build_schedule("gpipe", num_stages=2, num_microbatches=1)
    with pytest.raises(ValueError, match="1 entries for 2 streams"):
        simulate(streams, [stage_times(1, 1)], {(0, 1): 0})
    with pytest.raises(ValueError, match=r"no entry \(0, 1\).*sendF0->1"):
        simulate(streams, [stage_times(1, 1)] * 2, {})
    with pytest.raises(ValueError, match=r"transfer_s\[0, 1\]=nan"):
        simulate(streams, [stage_times(1, 1)] * 2, {(0, 1): float("nan")})
    with pytest.raises(ValueError, match="backward_s=-1"):
        stage_times(1, -1)


# --- trace -----------------------------------------------------------------------------------


def test_the_chrome_trace_shows_every_event_on_a_named_track_of_its_stage() -> None:
    timeline = run("1f1b", [(1, 2, 1, 1)] * 3, 4, {(0, 1): 1, (1, 2): 1, (0, 2): 1})
    trace = json.loads(json.dumps(timeline.chrome_trace()))["traceEvents"]
    labels = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["ph"] == "M"}
    assert [labels["process_name", s, 0] for s in range(3)] == ["stage 0", "stage 1", "stage 2"]
    spans = [e for e in trace if e["ph"] == "X"]
    assert [
        (e["pid"], labels["thread_name", e["pid"], e["tid"]], e["name"], e["ts"], e["dur"])
        for e in spans
    ] == [
        (e.stage, e.track, e.name, e.start_s * 1e6, (e.end_s - e.start_s) * 1e6)
        for e in timeline.events
    ]
    assert max(e["ts"] + e["dur"] for e in spans) == timeline.step_time_s * 1e6
