"""Transfers between stages of different ranks."""

from meshwright.executor.transfers.channels import Channels, handed, release, stage_channels
