"""Configurations of other software, read and written by one table of correspondences: the keys of
each format beside decisions (`correspondence.py`), a module for each software, what follows for a
cluster and a model (`configuration.py`), plans as configurations (`exporting.py`), and as a script
of plain PyTorch (`torch_script.py`)."""

from meshwright.planner.frameworks.configuration import Configuration
from meshwright.planner.frameworks.correspondence import ConfigurationError, Format, Lost
from meshwright.planner.frameworks.exporting import Exported, exported
from meshwright.planner.frameworks.formats import FORMATS, configuration_of, read_configuration
