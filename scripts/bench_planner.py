"""Time of every planning phase for models of published size, without a weight or a GPU; our plans
against published ones.

    python scripts/bench_planner.py [CASE ...] [--replan]
    python scripts/bench_planner.py --experts [--case TEXT] [--same-recompute] [--pin]
                                    [--time-limit S]

CPU seconds of this process, trace included; the plan, its predicted step, MFU and the bound of the
search beside them. `--replan` times planning a second time with one override, on what the first
search has priced. `--experts` compares with the plans of `experts/plans.py` whose names or sources
contain TEXT, under our cost model, and exits with 1 where ours is slower by more than 0.5 %;
`--same-recompute` has ours recompute as theirs does; `--pin` searches again with the published
decisions as overrides and checks that theirs is found, or a better one in what they leave open;
`--time-limit` bounds each search.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding import analyse
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import describe, seconds
from meshwright.planner.search import Search, SearchResult
from meshwright.planner.tracing import trace
from meshwright.profiles.cluster import Cluster
from scripts.experts.compare import compare, show, summary
from scripts.experts.plans import experts


def gpt(layers: int, hidden: int, heads: int, vocabulary: int, length: int) -> torch.nn.Module:
    with torch.device("meta"):
        config = GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, n_positions=length)
        config.vocab_size = vocabulary
        return GPT2LMHeadModel(config)


def llama(layers: int, hidden: int, heads: int, ffn: int) -> torch.nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128256,
                hidden_size=hidden,
                intermediate_size=ffn,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=8,
                max_position_embeddings=8192,
            )
        )


def gpt3() -> torch.nn.Module:
    return gpt(96, 12288, 96, 51200, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on nodes of 8 devices of the catalog; `batch` rows of `length` tokens a step."""

    model: Callable[[], torch.nn.Module]
    length: int
    node: str
    nodes: int
    batch: int
    precision: str = "bf16"


CASES: Mapping[str, Case] = {
    "gpt2": Case(
        model=lambda: gpt(12, 768, 12, 50257, 1024),
        length=1024, node="dgx-h100", nodes=1, batch=64,
    ),
    "gpt-39b": Case(  # Alpa's largest GPT
        model=lambda: gpt(48, 8192, 64, 51200, 1024),
        length=1024, node="p3.16xlarge", nodes=8, batch=1024, precision="fp16",
    ),
    "llama-8b": Case(
        model=lambda: llama(32, 4096, 32, 14336),
        length=4096, node="dgx-h100", nodes=8, batch=256,
    ),
    "gpt3-64": Case(model=gpt3, length=2048, node="dgx-a100", nodes=8, batch=512),
    "gpt3-1024": Case(model=gpt3, length=2048, node="dgx-a100", nodes=128, batch=1536),
    "llama-405b": Case(
        model=lambda: llama(126, 16384, 128, 53248),
        length=8192, node="dgx-h100", nodes=2048, batch=2048,
    ),
    "deep-gpt": Case(
        model=lambda: gpt(1024, 2048, 16, 51200, 2048),
        length=2048, node="dgx-a100", nodes=32, batch=512,
    ),
}  # fmt: skip


def bench(name: str, *, replan: bool) -> None:
    """Plan once, or twice, and print the phases."""
    case = CASES[name]
    cluster = Cluster.from_catalog(case.node, num_nodes=case.nodes)
    ids = torch.empty(2, case.length, dtype=torch.long, device="meta")
    model = case.model()
    started = time.process_time()
    graph = trace(model, {"input_ids": ids, "labels": ids}, precision=case.precision)
    traced = time.process_time()
    table = analyse(graph)
    graph = cut_blocks(graph, table)
    cut = time.process_time()
    problem = Problem(graph=graph, factors=table, cluster=cluster, precision=case.precision)
    search = Search(problem, case.batch, Overrides())
    result = search.run()
    done = time.process_time()
    print(f"{name}: {graph.num_parameters() / 1e9:.3g} B parameters on {cluster.describe()}")
    show_phases(
        {"trace": traced - started, "factors, blocks": cut - traced}, result, done - started
    )
    if not replan:
        return
    override = Overrides(tp=result.best.plan.stages[0].tp)
    started = time.process_time()
    result = search.again(override)
    print(f"  again with tp={override.tp}:")
    show_phases({}, result, time.process_time() - started)


def show_phases(before: Mapping[str, float], result: SearchResult, total_s: float) -> None:
    phases = {**before, **result.phases_s}
    print("  " + ", ".join(f"{phase} {s:.1f}" for phase, s in phases.items()), end="")
    print(f"; in all {total_s:.1f} CPU-s")
    best = result.best
    mfu = best.evaluation.prediction.mfu
    print(f"  {describe(best.plan)}: {seconds(best.step_time_s)} a step, MFU {mfu:.1%}")
    print(f"  no plan of the space is faster than {seconds(result.bound_s)}: gap {result.gap:.2%}")


def bench_experts(text: str, *, pin: bool, like_theirs: bool, time_limit_s: float | None) -> bool:
    """Compare with published plans; whether all is well."""
    chosen = [e for e in experts() if text.lower() in f"{e.name} {e.source}".lower()]
    if not chosen:
        raise SystemExit(f"no published plan's name or source contains {text!r}")
    done = []
    for comparison in compare(chosen, pin=pin, like_theirs=like_theirs, time_limit_s=time_limit_s):
        done.append(comparison)
        print(show(comparison), flush=True)
    print(f"\n{summary(done)}")
    return not any(c.failed for c in done)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--replan", action="store_true", help="plan again with one override")
    parser.add_argument("--experts", action="store_true", help="compare with published plans")
    parser.add_argument("--case", default="", metavar="TEXT", help="only plans that contain TEXT")
    parser.add_argument("--same-recompute", action="store_true", help="recompute as they do")
    parser.add_argument("--pin", action="store_true", help="reproduce them by overrides")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds of each search")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.experts:
        well = bench_experts(
            args.case, pin=args.pin, like_theirs=args.same_recompute, time_limit_s=args.time_limit
        )
        raise SystemExit(0 if well else 1)
    for name in args.cases or CASES:
        if name not in CASES:
            raise SystemExit(f"no case {name!r}; legal: {', '.join(CASES)}")
        bench(name, replan=args.replan)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of the planner {peak:.2f} GiB")


if __name__ == "__main__":
    main()
