"""Shardings as text: glob -> decision about operators and parameters (`resolve_shardings`), and
back (`express_shardings`)."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import FOLLOW, Entry
from meshwright.planner.plan.ranges import PlanError
from meshwright.profiles.inputs.limits import MAX_TEXT


@lru_cache(maxsize=1024)
def glob(pattern: str) -> re.Pattern[str]:
    """A pattern over FQNs and operator keys: `*` stays within one component, `**` crosses dots.

    Text between wildcards is taken at its first place, and never looked for again (atomic groups,
    `(?>...)`), so that the expression takes time quadratic in a name, whatever the number of
    wildcards. Only what follows the last wildcard of its kind is bound to the end.
    """
    if len(pattern) > MAX_TEXT:
        raise PlanError("is too long", place=f"pattern {pattern:.60}...", legal=f"up to {MAX_TEXT}")
    *crossed, last = map(_within, re.split(r"(?:\*\*)+", pattern))
    parts = [first_found for _, first_found in crossed]
    text = "".join([*parts[:1], *(f"(?>.*?{part})" for part in parts[1:])])
    return re.compile(f"{text}{'.*?' if crossed else ''}{last[0]}\\Z", re.DOTALL)


def _within(pattern: str) -> tuple[str, str]:
    """A pattern without `**`, as it stands at the end of a name and elsewhere."""
    first, *rest = (
        "".join("[^.:]" if c == "?" else re.escape(c) for c in part)
        for part in re.split(r"\*+", pattern)
    )
    atomic = [f"(?>[^.:]*?{part})" for part in rest]
    end = "".join([first, *atomic[:-1], *(f"[^.:]*{part}" for part in rest[-1:])])
    return end, "".join([first, *atomic])


def resolve_shardings(
    graph: Graph, blocks: Sequence[Block], shardings: Mapping[str, str], place: str = "plan"
) -> dict[str, Entry]:
    """Entries, by operator name or parameter value, of globs; the longest pattern wins.

    `*` stays within one component of a name, `**` crosses dots. A pattern without `:` names a
    module (its matrix products and embeddings) or a parameter, a tied one by any of its full names.
    Raises `PlanError` with the nearest names where a pattern matches nothing, and for a decision
    that can't be read.
    """
    entries: dict[str, Entry] = {}
    matched: set[str] = set()
    for block in blocks:
        of_block, patterns = resolve_block(graph, block, shardings, place)
        entries |= of_block
        matched |= patterns
    check_matched(graph, blocks, shardings, matched, place)
    return entries


def check_matched(
    graph: Graph,
    blocks: Sequence[Block],
    shardings: Mapping[str, str],
    matched: Collection[str],
    place: str,
) -> None:
    """Raise `PlanError`, with the nearest names, for a pattern that is not among those matched."""
    for pattern in shardings:
        if pattern not in matched:
            raise PlanError(
                " matches nothing",
                place=f"{place}: sharding {pattern!r}",
                legal=_named(graph, blocks, pattern),
                way_out="correct or drop the pattern",
            )


def resolve_block(
    graph: Graph, block: Block, shardings: Mapping[str, str], place: str
) -> tuple[dict[str, Entry], frozenset[str]]:
    """Entries of one block, and the patterns that match something in it. Raises `PlanError` for a
    decision that can't be read."""
    entries: dict[str, Entry] = {}
    matched: set[str] = set()
    order = sorted(shardings, key=lambda p: (_length(p), p))
    last: dict[str, str] = {}
    compiled = [(p, glob(p), ":" in p) for p in order]
    for op in block.ops:
        for pattern, regex, exact in compiled:
            named = op.key if exact else op.module if traits_of(op).main else ""
            if named and regex.match(named):
                _check_order(shardings, last.get(op.name), pattern, named, place)
                last[op.name] = pattern
                entries[op.name] = _entry(shardings[pattern], pattern, place)
                matched.add(pattern)
    named_ops = frozenset(matched)
    for value in block.parameters:
        fqn = graph.parameters[value]
        for pattern, regex, exact in compiled:
            if pattern in named_ops and not _is_state(shardings[pattern]):
                continue  # a strategy for the operators that the pattern named
            if not exact and (regex.match(fqn) or graph.aliases.get(pattern) == fqn):
                text = shardings[pattern].strip()  # the state that it is stored in
                arrow = "" if text in ("", FOLLOW) or "->" in text else "-> "
                entries[value] = _entry(arrow + text, pattern, place)
                matched.add(pattern)
    return entries, frozenset(matched)


def _length(pattern: str) -> int:
    return len(pattern.replace("*", ""))


def _check_order(
    shardings: Mapping[str, str], before: str | None, pattern: str, name: str, place: str
) -> None:
    """Raise `PlanError` where two patterns of one length give a name different decisions."""
    if before is None or _length(before) < _length(pattern):
        return
    if shardings[before].split() != shardings[pattern].split():
        raise PlanError(
            f" contradicts {before!r}: both name {name}, as {shardings[pattern]!r} and "
            f"{shardings[before]!r}",
            place=f"{place}: sharding {pattern!r}",
            legal="one decision, or a longer pattern for the exception",
            way_out="drop one of the two, or make one longer",
        )


def _named(graph: Graph, blocks: Sequence[Block], pattern: str) -> str:
    """Legal names for a pattern that matches nothing: the operators of the module that it names, or
    the nearest names."""
    ops = [op for block in blocks for op in block.ops]
    inside = [op.key for op in ops if glob(pattern).match(op.module)]
    if inside:
        return (
            "a module with a matrix product or embedding, or an operator of this one: "
            f"{', '.join(dict.fromkeys(inside[:8]))}"
        )
    names = {op.key for op in ops} if ":" in pattern else {op.module for op in ops}
    names |= {graph.parameters[value] for block in blocks for value in block.parameters}
    if "*" in pattern:
        names = {re.sub(r"(?<=\.)\d+(?=[.:]|$)", "*", name) for name in names}
    near = difflib.get_close_matches(pattern, sorted(names - {""}), n=3, cutoff=0.3)
    return f"a module, operator or parameter; nearest: {', '.join(near) or 'none'}"


def _entry(text: str, pattern: str, place: str) -> Entry:
    wanted = re.sub(r"\s*->\s*", "->", text.replace("@tp", "").strip())
    if not wanted:
        raise PlanError(
            f"sharding {pattern!r} is empty",
            place=place,
            legal=f"a strategy (colwise), a state (-> S(1)), both (colwise -> S(1)), or {FOLLOW}",
        )
    try:
        return Entry.parse(wanted)
    except ValueError as error:
        raise PlanError.of(error, f"{place}: sharding {pattern!r:.80}") from None


def _is_state(text: str) -> bool:
    """Whether a decision is a placement state, not a strategy."""
    return bool(re.fullmatch(r"\s*(->)?\s*(R|P|S\(.*\))(@tp)?\s*", text))


def express_shardings(
    graph: Graph, blocks: Sequence[Block], entries: Mapping[str, Entry]
) -> dict[str, str]:
    """Entries as globs: a decision that most repeats of a block share is written once with `*`, the
    exceptions after it by their full names (the longest pattern wins)."""
    texts: dict[str, str | None] = {}
    groups: dict[str, list[str]] = {}
    for block in blocks:
        stem = re.fullmatch(r"(.*\.)\d+", block.name)
        keyed = {op.name: op.key for op in block.ops} | {
            v: graph.parameters[v] for v in block.parameters
        }
        for name, key in keyed.items():
            entry = entries.get(name)
            texts[key] = None
            if entry is not None:
                texts[key] = f"{entry.state}@tp" if name in graph.parameters else str(entry)
            if stem and key.startswith(block.name):
                groups.setdefault(f"{stem[1]}*{key.removeprefix(block.name)}", []).append(key)
    out: dict[str, str] = {}
    done: set[str] = set()
    for pattern, keys in groups.items():
        regex = glob(pattern)
        if len(keys) < 2 or {key for key in texts if regex.match(key)} != set(keys):
            continue
        common, count = Counter(texts[key] for key in keys).most_common(1)[0]
        if common is None or count < 2:
            continue
        out[pattern] = common
        out |= {key: texts[key] or FOLLOW for key in keys if texts[key] != common}
        done |= set(keys)
    out |= {key: text for key, text in texts.items() if text is not None and key not in done}
    return out
