"""Configurations of other software, read and written by one table of correspondences: the keys of
each format beside decisions (`correspondence.py`), a module for each software, what follows for a
cluster and a model (`configuration.py`), and plans as configurations (`exporting.py`)."""

from meshwright.planner.frameworks.configuration import Configuration
from meshwright.planner.frameworks.correspondence import ConfigurationError, Format
from meshwright.planner.frameworks.exporting import Exported, Lost, exported
from meshwright.planner.frameworks.formats import FORMATS, configuration_of, read_configuration
