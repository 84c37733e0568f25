"""What users give: the error that refuses it, and the reader of their files."""

from meshwright.profiles.inputs.errors import MeshwrightError, NotInstalledError, shown
from meshwright.profiles.inputs.files import (
    MAX_MEASURED_BYTES,
    irregular,
    parse_json,
    read_json,
    read_text,
    read_toml,
)

__all__ = [
    "MAX_MEASURED_BYTES", "MeshwrightError", "NotInstalledError", "irregular", "parse_json",
    "read_json", "read_text", "read_toml", "shown",
]  # fmt: skip
