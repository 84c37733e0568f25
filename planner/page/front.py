"""The front of the page: the plan in a sentence, the cluster with its stages, six numbers, whether
it fits, and the lines that run it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from meshwright.costmodel.intervals import SURE
from meshwright.planner.decisions import DECISIONS
from meshwright.planner.page.cells import (
    REHEARSED,
    Cell,
    Row,
    between,
    ends,
    gib,
    many,
    number,
    peaks_of,
    scaled,
    share,
    stage_words,
    time,
)
from meshwright.planner.plan import counted, expand_ranks, peak_words, seconds, slower

FORM = re.compile(r"\d+gb|sxm|pcie")  # parts of a device's name that a sentence does without
SIZE = re.compile(r"\d[bBmM]\b")  # in a model's name
ZERO = {  # what replicas divide among them
    1: "the optimizer's states",
    2: "the optimizer's states and gradients",
    3: "weights, gradients and the optimizer's states",
}
MOST_SURE = 0.99  # that a probability is said to be
COLOURS = (  # of device groups, here and in the timeline
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#eeca3b", "#72b7b2", "#9d755d", "#9fa844",
)  # fmt: skip
BRIGHT = ("#f58518", "#eeca3b", "#72b7b2", "#9fa844")  # on which black is read better than white
MOST_NODES = 8  # of a device group that are drawn
MOST_RANKS = 128  # of all groups: more are drawn by a node of each
MOST_GROUPS = 32  # that are drawn


# --- sentence ------------------------------------------------------------------------------------


def sentence(data: Row) -> str:
    """The plan for a reader who knows no degrees: model, devices, stages, what each does, step,
    MFU, whether it fits."""
    summary = data["summary"]
    return (
        f"{model_words(data)} on {device_words(data)}: {_layout(data)}{_of_blocks(data)}; "
        f"{seconds(summary['step_time_s'])} a step, {percent(summary['mfu'])} MFU, "
        f"{fits_words(summary)}"
    )


def _of_blocks(data: Row) -> str:
    """Decisions about blocks: full recompute of some blocks."""
    lines = []
    for name, decision in DECISIONS.items():
        if decision.acts == "block" and decision.line:
            words = {word for stage in data["stages"] for word in stage[name].split()}
            lines.append(decision.line([value for value in decision.legal if value in words]))
    return "".join(f", {line}" for line in lines if line)


def model_words(data: Row) -> str:
    """Llama (70.6 B parameters); Llama-3-70B."""
    name: str = data.get("made", {}).get("model", "")
    size = counted(data["summary"]["parameters"])
    if not name:
        return f"A model of {size} parameters"
    return name if SIZE.search(name) else f"{name} ({size} parameters)"


def device_words(data: Row) -> str:
    """64 H100; 4 CPU processes."""
    cluster = data["cluster"]
    count: int = cluster["num_nodes"] * cluster["devices_per_node"]
    if cluster["device"] == "local-cpu":
        return f"{count} CPU process" + "es" * (count > 1)
    parts = [part for part in cluster["device"].split("-") if not FORM.fullmatch(part)]
    return f"{count:,} {' '.join(parts).upper()}"


def fits_words(summary: Row) -> str:
    """Fits with 97 %."""
    words = {"fits": "fits with", "tight": "tight: fits with"}
    verdict = words.get(summary["memory_verdict"], "does not fit: room is enough with")
    return f"{verdict} {percent(summary['memory_probability'])}"


def percent(part: float) -> str:
    """39 %; a probability is never all."""
    return f"{100 * part:.0f} %" if part < MOST_SURE else f"over {100 * MOST_SURE:.0f} %"


def _layout(data: Row) -> str:
    """4 pipeline stages of 16 GPUs; in each, 4-way tensor parallelism and 4 replicas."""
    groups, stages = data["device_groups"], len(data["stages"])
    sizes = sorted({len(expand_ranks(group["ranks"])) for group in groups})
    count, thing = len(groups), "process" if data["cluster"]["device"] == "local-cpu" else "GPU"
    plural = thing + ("es" if thing == "process" else "s")
    inner = {inner_words(group, data["stages"][group["stages"][0]]) for group in groups}
    inside = inner.pop() if len(inner) == 1 else "meshes that differ"
    if count == 1:
        return inside or f"the whole model on one {thing}"
    size = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
    each = f"{size} {plural if sizes[-1] > 1 else thing}"
    head = f"{count} pipeline stages of {each}"
    if stages > count:
        of_groups = sorted({len(group["stages"]) for group in groups})
        number = " to ".join(map(str, dict.fromkeys((of_groups[0], of_groups[-1]))))
        head = f"{stages} pipeline stages, {number} on each of {count} groups of {each}"
    return f"{head}; in each, {inside}" if inside else head


def inner_words(group: Row, stage: Row) -> str:
    """4-way tensor parallelism and 4 replicas; nothing on one device."""
    tp, cp, dp, ep = (group[axis] for axis in ("tp", "cp", "dp", "ep"))
    zero = ZERO.get(stage.get("zero", 0))
    words = [f"{tp}-way tensor parallelism"] * (tp > 1)
    words += [f"{cp}-way context parallelism"] * (cp > 1)
    if dp > 1:
        replicas = f"{dp} replicas"
        shared = [f"the experts {ep} ways"] * (ep > 1)
        shared += [zero] if zero else []
        words.append(replicas + f" that share out {' and '.join(shared)}" * bool(shared))
    elif ep > 1:
        words.append(f"experts shared out {ep} ways")
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


# --- picture -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node's ranks of a device group, those of one replica together."""

    name: str
    replicas: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A device group: its stages, their blocks, the first of its nodes, and how many more."""

    title: str
    blocks: str
    about: str
    colour: str
    ink: str
    nodes: Sequence[Node]
    more: str


def picture(data: Row) -> list[Group]:
    """The device groups with their nodes; of many the first, half of them at either end."""
    groups, per_node = data["device_groups"], data["cluster"]["devices_per_node"]
    ranks = data["cluster"]["num_nodes"] * per_node
    most = 1 if ranks > MOST_RANKS else MOST_NODES
    half = MOST_GROUPS // 2
    drawn = groups if len(groups) <= MOST_GROUPS else [*groups[:half], *groups[-half:]]
    inner = {row["ranks"]: inner_words(row, data["stages"][row["stages"][0]]) for row in groups}
    if len(set(inner.values())) == 1:  # which the sentence says
        inner = dict.fromkeys(inner, "")
    colours = {row["ranks"]: COLOURS[k % len(COLOURS)] for k, row in enumerate(groups)}
    return [_group(data, row, colours[row["ranks"]], inner[row["ranks"]], most) for row in drawn]


def _group(data: Row, row: Row, colour: str, about: str, most: int) -> Group:
    per_node = data["cluster"]["devices_per_node"]
    places = [*enumerate(expand_ranks(row["ranks"]))]
    replica = row["cp"] * row["tp"]
    nodes = []
    for name, of_node in groupby(places, lambda place: place[1] // per_node):
        replicas = groupby(of_node, lambda place: place[0] // replica)
        nodes.append(
            Node(name=f"node {name}", replicas=[[rank for _, rank in of] for _, of in replicas])
        )
    blocks = [", ".join(data["stages"][k]["blocks"]) for k in row["stages"]]
    return Group(
        title=stage_words(row["stages"]) if len(data["stages"]) > 1 else "all ranks",
        blocks=ends(blocks, "; "),
        about=about,
        colour=colour,
        ink="#000" if colour in BRIGHT else "#fff",
        nodes=nodes[:most],
        more=f"and {many(len(nodes) - most, 'node')} alike" if len(nodes) > most else "",
    )


# --- numbers -------------------------------------------------------------------------------------

Fact = tuple[str, Cell, str]


def tiles(data: Row) -> list[Fact]:
    """The six numbers: name, number, and a line about it."""
    summary, through = data["summary"], data["throughput"]
    level = f"{data['uncertainty']['level']:.0%}"
    count, parts = partial(scaled, unit=""), data["components_s"]
    rate = "tokens" if through["tokens_per_s"] else "rows"
    per_s = through[f"{rate}_per_s"]
    rehearsed = peaks_of(summary).get(REHEARSED)
    peak = f"{between(gib, summary['memory_interval_bytes'])} with {level}"
    peak = f"{REHEARSED} {gib(rehearsed).text}" if rehearsed else peak
    idle = _bubble(summary)
    if len(data["device_groups"]) == 1:
        waits = sum(
            parts.get(name, 0.0) for name in ("exposed communication", "gradient reduction")
        )
        idle = ("communication", time(waits), "of the step that nothing hides")
    probability = summary["memory_probability"]
    likely = Cell(text=percent(probability), value=probability)
    return [
        ("step", time(summary["step_time_s"]),
         f"{between(time, summary['step_interval_s'])} with {level}"),
        (f"{rate} a second", count(per_s), _within(count, through, f"{rate}_per_s").rstrip("; ")),
        ("MFU", share(through["mfu"]), _within(share, through, "mfu").rstrip("; ")),
        ("fits with", likely, f"by the {summary['memory_verdict_by']}"),
        ("peak memory", gib(max(summary["peak_memory_bytes"])),
         f"of {gib(summary['memory_bytes']).text}; {peak}"),
        idle,
    ]  # fmt: skip


def _bubble(summary: Row) -> Fact:
    return "bubble", share(summary["bubble_fraction"]), "of the pipeline's time devices wait"


def more_numbers(data: Row) -> list[Fact]:
    """Rates of a device, other units, and what the run costs where it was asked."""
    through, flops = data["throughput"], data["throughput"]["model_flops_per_s_per_device"]
    facts: list[Fact] = []
    if through["tokens_per_s"]:
        rows = (
            f"{_within(number, through, 'rows_per_s')}{data['plan']['global_batch_size']:,} a step"
        )
        facts.append(("rows a second", number(through["rows_per_s"]), rows))
        facts.append(("tokens a second and device", number(through["tokens_per_s_per_device"]), ""))
    if len(data["device_groups"]) == 1:
        facts.append(_bubble(data["summary"]))
    hours = f"{_within(number, through, 'device_hours')}of a step"
    return [
        *facts,
        ("HFU", share(through["hfu"]), "with the FLOPs of recompute"),
        ("model FLOPs a second and device", scaled(flops, "FLOP/s"), ""),
        ("device-hours", number(through["device_hours_per_step"]), hours),
        *_cost(data.get("cost", {})),
    ]


def _within(cell: Callable[[float], Cell], through: Row, name: str) -> str:
    """The interval of a number, before the text about it; reports of before have none."""
    interval = through.get(f"{name}_interval")
    return f"{between(cell, interval)}; " if interval else ""


def _cost(cost: Row) -> Iterator[Fact]:
    if "price_per_step" in cost:
        yield "price of a step", number(cost["price_per_step"]), "at the price given"
    if "energy_kwh_per_step" in cost:
        power = f"kWh, at {number(cost['power_watts']).text} W a device as given"
        yield "energy of a step", number(cost["energy_kwh_per_step"]), power
    if "days" in cost:
        tokens, hours = scaled(cost["tokens"], "tokens").text, number(cost["device_hours"]).text
        about = f"{_within(number, cost, 'days')}for {tokens}, {hours} device-hours"
        yield "days", number(cost["days"]), about
    for title, name, unit in (("price", "price", ""), ("energy", "energy_kwh", "kWh, ")):
        if name in cost:
            million = number(cost[f"{name}_per_million_tokens"]).text
            yield title, number(cost[name]), f"{unit}{million} a million tokens"


# --- whether it fits -----------------------------------------------------------------------------


def fit_answers(data: Row) -> list[tuple[str, str]]:
    """Whether the plan fits, what decides it, and the plan that surely fits with its cost."""
    return [
        ("This plan", _likely(data["summary"])),
        ("What decides", decides(data)),
        ("Surely fits", _surely(data)),
    ]


def _likely(summary: Row) -> str:
    text = f"{fits_words(summary)}, by the {summary['memory_verdict_by']}."
    if summary["memory_verdict_by"] == "price":
        interval = between(gib, summary["memory_interval_bytes"])
        has = gib(summary["memory_bytes"]).text
        return f"{text} The 80 % interval of the peak is {interval}; a device has {has}."
    return (
        f"{text} Rehearsed are {gib(summary['rehearsed_tensor_bytes']).text} of tensors, "
        f"{gib(summary['bytes_beside_tensors']).text} are reserved beside them."
    )


def decides(data: Row) -> str:
    """The largest part of the fullest device, and when its peak comes."""
    fullest = max(data["memory"], key=lambda row: row["priced_bytes"])
    part, nbytes = max(fullest["parts"].items(), key=lambda part: part[1])
    rehearsed = data["summary"].get("rehearsed_memory_bytes")
    where = f" of {stage_words(fullest['stages'])}" * (len(data["memory"]) > 1)
    return (
        f"{part}: {gib(nbytes).text} of the {gib(fullest['priced_bytes']).text} that a device"
        f"{where} holds at its peak, in the {peak_words(fullest['moment'], fullest['block'])}."
        + (f" Rehearsed were {gib(max(rehearsed)).text}." if rehearsed else "")
    )


def _surely(data: Row) -> str:
    summary, sure = data["summary"], data.get("surely_fits", {})
    if summary["memory_probability"] >= SURE:
        return f"this one, as {percent(SURE)} or more count as sure: there is nothing to pay for."
    if not sure:
        return (
            "none was searched, as the plan was given; `meshwright plan` with a larger "
            "`--memory-margin` searches for one."
        )
    found = f"`--memory-margin {sure['memory_margin']:g}`"
    if sure["plan"] is None:
        return (
            f"no plan fits with {percent(SURE)} ({found}): take more devices, or less of a batch."
        )
    return (
        f"{sure['plan']} fits with {percent(sure['memory_probability'])} and takes "
        f"{seconds(sure['step_time_s'])} a step ({slower(sure['slower'])}); {found} chooses it."
    )


# --- launch --------------------------------------------------------------------------------------


def launch_line(
    module: str, cluster: str, nodes: int, each: int, batch: int, precision: str, plan: str
) -> str:
    """The command that trains by a plan file; on several nodes HOST is the first one's name, NODE
    the number of the one that it runs on."""
    where = "--node-rank $NODE --master-addr $HOST --master-port 29500"
    how = f"--nnodes {nodes} {where}" if nodes > 1 else "--standalone"
    return f"torchrun {how} --nproc-per-node {each} -m meshwright " + _run(
        module, cluster, batch, precision, plan
    )


def _run(module: str, cluster: str, batch: int, precision: str, plan: str) -> str:
    return f"run {module} --cluster {cluster} --batch {batch} --precision {precision} --plan {plan}"


def commands(data: Row) -> list[tuple[str, str]]:
    """Purposes, and the commands that use the plan for them, saved as plan.json."""
    cluster, plan, (module, named) = data["cluster"], data["plan"], _given(data)
    nodes, each, batch = (
        cluster["num_nodes"],
        cluster["devices_per_node"],
        plan["global_batch_size"],
    )
    launched = launch_line(module, named, nodes, each, batch, plan["precision"], "plan.json")
    rows = [("train by it", wrapped(launched))]
    if nodes > 1:
        first = "HOST=node-0 NODE=0  # the first node's name; this node's number, from 0"
        head = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        run = _run(module, named, batch, plan["precision"], "plan.json")
        srun = (
            f"srun --nodes {nodes} --ntasks-per-node 1 torchrun --nnodes {nodes} --nproc-per-node "
            f'{each} --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" '
            f"-m meshwright {run}"
        )
        rows = [
            (f"train by it, on each of {nodes} nodes", f"{first}\n{wrapped(launched)}"),
            ("train by it, under Slurm", f"{head}\n{wrapped(srun)}"),
        ]
    report = f"meshwright report plan.json {module} --cluster {named} --batch {batch} -o plan.html"
    script = 'auto_parallelize(model, cluster, ..., plan="plan.json")'
    return [*rows, ("write this page again", wrapped(report)), ("in a script", script)]


def _given(data: Row) -> tuple[str, str]:
    """Model and cluster as the command line named them, or what stands for them."""
    made, flag = data.get("made", {}), data["cluster"].get("flag")
    return made.get("module", "MODULE:FUNCTION"), made.get("cluster") or flag or "CLUSTER"


def wrapped(command: str) -> str:
    """A command over lines that a shell joins."""
    parts = re.split(r" (?=-m |--rdzv-backend|--batch)", command)
    return " \\\n    ".join(parts)


SENSITIVITY = (
    "What would change the decision?",
    "The bandwidth, FLOP/s or memory from which on another plan is chosen. It takes seconds of "
    "planning; in a script, report.html(path, sensitivity=True).",
    "--sensitivity",
)
REHEARSAL = (
    "Does the plan's own step run, and in how much memory?",
    "A rehearsal runs the plan's step here, without devices, for one rank of each kind: its peak, "
    "FLOPs and bytes on links stand beside the price then. In a script, result.rehearse() before "
    "result.report.html(path).",
    "--rehearse",
)
COST = (
    "What does the training cost?",
    "Days, money and energy: no price is assumed. In a script, report.html(path, tokens=2e12, "
    "price_per_hour=2.5, power_watts=700).",
    "--tokens 2e12 --price 2.5 --watts 700",
)


def left_out(data: Row) -> list[dict[str, str]]:
    """Answers that this page hasn't: what each says, what it takes, the command that adds it."""
    module, named = _given(data)
    batch = data["plan"]["global_batch_size"]
    plan = data.get("made", {}).get("command", "")
    if not plan.startswith("meshwright plan "):  # which alone takes these flags
        plan = f"meshwright plan {module} --cluster {named} --batch {batch}"
    plan += " --html plan.html" * ("--html" not in plan)
    answers = {"sensitivity": SENSITIVITY, "rehearsal": REHEARSAL, "cost": COST}
    return [
        {"title": title, "about": about, "command": f"{plan} {flags}"}
        for name, (title, about, flags) in answers.items()
        if name not in data
    ]
