"""Answers that a report is asked for later: alternatives, prices of overrides, flips, advice."""

from meshwright.planner.alternatives.answers import Answers, logits_bind
from meshwright.planner.alternatives.explained import Explained, explain_search, instead
from meshwright.planner.alternatives.ways_out import with_ways_out
from meshwright.planner.alternatives.what_if import CHUNKS, with_sequences
