"""What users give: the error that refuses it, and the reader of their files."""

from meshwright.profiles.inputs.errors import MeshwrightError, NotInstalledError, shown
from meshwright.profiles.inputs.files import parse_json, read_json, read_text, read_toml

__all__ = [
    "MeshwrightError", "NotInstalledError", "parse_json", "read_json", "read_text", "read_toml",
    "shown",
]  # fmt: skip
