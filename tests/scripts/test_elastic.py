"""A host that is killed in the midst of a step, and comes back."""

from pathlib import Path

from scripts.elastic.hosts import PLAIN, made_hosts
from scripts.elastic.trials import STEPS, reference, trial
from tests.helpers.tiers import second_tier


@second_tier("two hosts' torchrun trees; faults of ranks stay in tests/executor/ranks")
def test_a_run_goes_on_without_a_host_and_with_it_again(tmp_path: Path) -> None:
    """With the losses of a run that nothing happened to; no process is left."""
    expected = reference(tmp_path / "reference")
    assert sorted(expected) == [*range(1, STEPS + 1)]
    with made_hosts(PLAIN, 2, 1.0) as hosts:
        found = trial(tmp_path / "run", hosts, "backward", 2, expected)
    logs = "\n".join(path.read_text()[-2000:] for path in (tmp_path / "run").glob("host*.log"))
    assert found.passed, f"{found}\n{logs}"
    assert found.ranks == "2→1→2"
    assert 0 < found.again <= 4  # since the last checkpoint
    assert not any(host.processes() for host in hosts)
