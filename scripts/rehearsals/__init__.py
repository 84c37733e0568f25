"""Plans priced and rehearsed (`python -m scripts.rehearsals.table`), and large ones (`large`)."""
