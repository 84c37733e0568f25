"""`meshwright cluster`: files that are begun, shown, made anew; the schema."""

import json
from pathlib import Path

import pytest

from meshwright.profiles.cluster import Cluster
from tests.meshwright.commands import Captured, failed, printed

pytestmark = pytest.mark.usefixtures("in_a_folder")


def test_a_file_is_begun_and_shown(capsys: Captured) -> None:
    asked = ["--gpu", "rtx-4090", "--nodes", "2", "--per-node", "4", "--net", "25Gb/s"]
    text = printed(capsys, "cluster", "init", *asked)
    assert 'base = "rtx-4090"' in text and '# memory = "23.99 GiB"  # of each device' in text
    assert "written to lab.toml; `meshwright cluster show lab.toml`" in printed(
        capsys, "cluster", "init", *asked, "-o", "lab.toml"
    )
    assert Path("lab.toml").read_text().rstrip() == text.rstrip()
    cluster = Cluster.load("lab.toml")
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 4)
    shown = json.loads(printed(capsys, "cluster", "show", "lab.toml", "--json"))
    assert [(row["ranks"], row["nodes"]) for row in shown["groups"]] == [(2, 1), (4, 1), (8, 2)]
    small, _, large = shown["groups"][-1]["bus"]
    # a node's NICs carry what its four ranks send: 2 (n-1)/n of the bytes, as n-1 of n cross
    assert small < large <= 2 * 2.5e9
    assert "all-reduce of 64 MiB" in printed(capsys, "cluster", "show", "h100-sxm:4")
    assert "on nodes" in printed(capsys, "cluster", "show", "l4")


def test_a_file_is_made_anew(capsys: Captured) -> None:
    Path("old.toml").write_text('base = "l4"\n[inter_link]\nbandwidth = 5e9  # measured\n')
    assert 'write bandwidth = "5 GB/s"' in failed(capsys, ["cluster", "show", "old.toml"])
    printed(capsys, "cluster", "convert", "old.toml", "-o", "new.toml")
    assert Path("new.toml").read_text().endswith('bandwidth = "5 GB/s"  # measured\n')
    Path("old.toml").write_text('base = "l4"\n[inter_link]\nbandwidth = 25\n')
    err = failed(capsys, ["cluster", "convert", "old.toml", "-o", "never.toml"])
    assert 'did you mean bandwidth = "25 Gb/s"?' in err and not Path("never.toml").exists()


def test_the_schema_is_printed(capsys: Captured) -> None:
    assert json.loads(printed(capsys, "cluster", "schema"))["required"] == ["base"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["init", "--gpu", "rtx-4091"], "did you mean 'rtx-4090'"),
        (["init", "--gpu", "l4", "--net", "25"], "--net is '25'; legal: a number with a unit"),
        (["init", "--gpu", "l4", "--net", "25 B/s"], "which no link has"),
        (["init", "--gpu", "l4", "--nodes", "0"], "num_nodes is 0"),
        (["show", "missing.toml"], "missing.toml"),
        (["convert", "missing.toml"], "missing.toml"),
    ],
)
def test_mistakes_are_named(capsys: Captured, asked: list[str], says: str) -> None:
    assert says in failed(capsys, ["cluster", *asked])
