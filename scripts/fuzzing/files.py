"""Cases of files: plans, clusters, the catalog, measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

from meshwright.decisions import take_plan
from meshwright.planner.plan import Plan
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.catalog_reader import read_file
from meshwright.profiles.inputs import shown
from meshwright.profiles.op_signature import OpSignature
from meshwright.profiles.store import Store, import_json
from meshwright.shell.commands.show import plan_text
from meshwright.shell.profile_command import import_profile
from scripts.fuzzing import ground
from scripts.fuzzing.mutations import json_case, mutated, spoilt, toml_text, value

Case = tuple[str, Callable[[], object]]


def plan(rng: Random, folder: Path) -> Case:
    """A plan file, read, shown, checked against its model and priced."""
    path = folder / "plan.json"
    path.write_bytes(json_case(rng.choice(ground.plans()), rng))

    def run() -> None:
        read = Plan.load(path)
        again = Plan.from_json(read.to_json())
        assert again == read
        plan_text(read)
        take_plan(path, ground.problem(), ground.request(), {}, 0.0)

    return _start_of(path), run


def cluster(rng: Random, folder: Path) -> Case:
    """A cluster's TOML file, read, and a plan priced on it."""
    path = folder / "cluster.toml"
    if rng.random() < 0.3:
        path.write_bytes(spoilt(toml_text(ground.TOML), rng))
    else:
        path.write_text(toml_text(mutated(ground.TOML, rng)))

    def run() -> None:
        read = Cluster.load(path)
        read.describe()
        json.dumps(read.to_dict())
        ground.priced_on(read)

    return _start_of(path), run


def catalog(rng: Random, folder: Path) -> Case:
    """A file of the catalog, or a name and counts that are asked of it."""
    if rng.random() < 0.2:
        given = {"num_nodes": value(rng, python=True), "devices_per_node": value(rng, python=True)}
        some = {key: given[key] for key in given if rng.random() < 0.6}
        name = rng.choice(("h100-sxm", "dgx-a100", value(rng, python=True)))
        return f"from_catalog({shown(name)}, {shown(some)})", lambda: Cluster.from_catalog(
            name, **some
        )
    name, tree = rng.choice(ground.catalog())
    path = folder / f"{name}.json"
    path.write_bytes(json_case(tree, rng))

    def run() -> None:
        ground.cluster_of(read_file(path))

    return _start_of(path), run


def imported(rng: Random, folder: Path) -> Case:
    """Measurements of others: an exported profile, a log, a table; a signature."""
    kind = rng.choice(("json", "json", "log", "csv", "signature"))
    if kind == "signature":
        text = json_case(ground.SIGNATURE, rng).decode(errors="replace")
        return f"OpSignature.parse({text[:300]!r})", lambda: _used(OpSignature.parse(text))
    path = folder / f"measured.{kind}"
    if kind == "json":
        path.write_bytes(json_case(ground.PROFILE, rng))
    else:
        text = ground.LOG if kind == "log" else ground.TABLE
        path.write_bytes(spoilt(_other_cells(text, rng), rng) if rng.random() < 0.5 else
                         _other_cells(text, rng).encode(errors="replace"))  # fmt: skip
    store = Store(folder / "cache")
    if kind == "json":
        said = f"json {_start_of(path)}"
        return said, lambda: store.add(import_json(path, accepts=lambda _: True, expected="any"))
    counts = {"ranks": rng.choice((None, 2, 8, 0, -1, 10**30)), "nodes": rng.choice((None, 1, 0))}
    given = counts if kind == "log" and rng.random() < 0.3 else {}
    return f"{kind} {given} {_start_of(path)}", lambda: import_profile(
        Cluster.from_catalog("dgx-a100"), path, store, **given
    )


def _used(signature: OpSignature) -> None:
    assert OpSignature.parse(signature.text).text == signature.text
    _ = signature.dtype, signature.nbytes, signature.differentiable, signature.short


def _other_cells(text: str, rng: Random) -> str:
    """A table with one to three of its words replaced."""
    for _ in range(rng.choice((1, 2, 3))):
        words = text.replace(",", " ").split()
        text = text.replace(rng.choice(words), str(value(rng))[:200], 1)
    return text


def _start_of(path: Path) -> str:
    with path.open("rb") as file:
        return f"{path.stat().st_size} bytes, {file.read(700)!r}"
