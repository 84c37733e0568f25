"""Inputs of users: the error that refuses one, the reader of their files, the writer of others."""

from meshwright.profiles.inputs.errors import (
    ArgumentError,
    ClusterError,
    FileError,
    HardwareError,
    MeasuringError,
    MeshwrightError,
    NotInstalledError,
    ProfileError,
    shown,
)
from meshwright.profiles.inputs.files import (
    MAX_MEASURED_BYTES,
    irregular,
    parse_json,
    read_json,
    read_text,
    read_toml,
)
from meshwright.profiles.inputs.paths import (
    UnwritableError,
    check_writable,
    checked_path,
    write_text,
)
