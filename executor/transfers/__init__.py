"""Transfers between stages of different ranks."""

from meshwright.executor.transfers.channels import Channels, stage_channels
from meshwright.executor.transfers.release import handed, release
