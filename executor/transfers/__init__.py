"""What stages of different ranks send each other."""

from meshwright.executor.transfers.channels import Channels, stage_channels
from meshwright.executor.transfers.release import handed, release
