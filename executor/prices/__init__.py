"""Prices of what ran: operators as torch's dispatcher has them, collectives and messages."""

from meshwright.executor.prices.collectives import collective_of
from meshwright.executor.prices.prices import Prices
