"""The plans that `scripts/bench_rehearsals.py` prices and rehearses, and large ones (`large.py`)."""
