"""What stages of different ranks send each other."""

from meshwright.executor.transfers.channels import Channels, stage_channels

__all__ = ["Channels", "stage_channels"]
