"""Cases draw pages, too: their engine is started before anything is counted."""

from tests.planner.page import conftest  # noqa: F401 - an import starts it
