"""The Ray shell: the same results as in one process, on one node or two, and nothing left behind.

All tests share one Ray cluster, whose second node joins for the test that needs it; each ends its
own actors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError

import islands
from islands import experiment as driver
from islands.actors.cluster import Actors
from islands.actors.coordinator import RayWorkers
from islands.config import Experiment
from islands.job import prepare
from islands.plan import Lost, PlanOp, SendOut, Snapshot, Steps
from islands.results import SCHEMAS
from islands.results.folder import new_folder
from tests.test_fault_runs import faulty, schedule, without_clashes

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One head node for all tests of this file, with this process connected to it."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def tiny(method: Any = "diloco", **parts: Any) -> Experiment:
    """Four workers on two islands, 24 steps."""
    parts = {"steps": 24, "eval": {"every": 10, "windows": 8}, **parts}
    return Experiment(method=method, **parts)


def assert_same(one: islands.Result, other: islands.Result) -> None:
    """Every table and the final parameters are equal."""
    for name in SCHEMAS:
        assert one.table(name).equals(other.table(name)), name
    assert one.summary["parameters_sha256"] == other.summary["parameters_sha256"]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "method",
    [
        {"name": "dense"},
        {"name": "diloco", "sync_every": 7},
        {"name": "helpers:Fragments"},
        {"name": "helpers:EachArrival"},
    ],
    ids=lambda method: method["name"],
)
def test_ray_and_in_process_runs_are_the_same(method: dict[str, Any], tmp_path: Path) -> None:
    """Law 5: actors change nothing, whether rounds close by count or by the clock."""
    on_ray = islands.run(tiny(method), out=tmp_path / "ray")
    alone = islands.run(tiny(method), out=tmp_path / "alone", in_process=True)
    assert_same(on_ray, alone)


def test_plans_are_packed_again_unless_they_are_the_same() -> None:
    """Operations of different classes may be equal as tuples; each still goes out as what it is."""
    workers = RayWorkers([], [])
    plans: list[list[PlanOp]] = [[SendOut(0)], [Lost(0)], [Snapshot(False)], [Steps(0)]]
    packed = [workers._packed(plan, []) for plan in plans]
    assert len(set(packed)) == len(plans)
    assert workers._packed(plans[-1], []) is packed[-1]


@pytest.mark.usefixtures("cluster")
def test_faults_are_the_same_on_ray(tmp_path: Path) -> None:
    """Laws 5 and 10 under twenty random schedules of faults, on actors that go from run to run: the
    same fate of every part in every round, and the same parameters."""
    outcomes = []
    with (
        driver.Runner(None, in_process=False) as on_ray,
        driver.Runner(None, in_process=True) as alone,
    ):
        for seed in range(1000, 1020):
            method, faults, parts = schedule(seed)
            one = faulty(method, *without_clashes(faults), **{**parts, "seed": seed, "steps": 8})
            found = []
            for name, runner in (("ray", on_ray), ("alone", alone)):
                folder = new_folder(tmp_path / f"{name}{seed}", name, overwrite=False)
                error = None
                try:
                    runner.run(prepare(one), folder)
                except islands.RunError as raised:  # a run in which nobody is left ends so
                    error = str(raised)
                result = islands.Result.load(folder)
                fates, digest = (
                    result.summary[key] for key in ("contributions", "parameters_sha256")
                )
                found.append((error, fates, digest, result.table("syncs")))
            assert found[0] == found[1], seed
            outcomes.append(found[0][1])
    # The schedules reach every fate that a part can have.
    for fate in ("ok", "late", "dropped", "rejected", "absent"):
        assert sum(outcome[fate] for outcome in outcomes), fate


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("method", ["helpers:Fragments", "helpers:EachArrival"])
def test_the_wall_clock_changes_no_result(method: str, tmp_path: Path) -> None:
    """Law 5 where the link actor really holds deliveries back: the same results, and not before
    their time. Rounds that wait for everyone, and rounds that close by the clock."""
    parts: dict[str, Any] = {"method": {"name": method, "sync_every": 8}}
    wall = islands.run(tiny(**parts, clock="wall", time_scale=0.1), out=tmp_path / "wall")
    alone = islands.run(tiny(**parts), out=tmp_path / "alone", in_process=True)
    assert_same(wall, alone)
    pace = wall.summary["pace"]
    assert pace["wall_s"] >= 0.1 * alone.summary["emulated_s"]
    for link in pace["links"].values():
        assert 0 < link["achieved_bytes_per_s"] <= link["asked_bytes_per_s"]


@pytest.mark.usefixtures("cluster")
def test_large_updates_go_by_reference(tmp_path: Path) -> None:
    """A model whose updates do not fit into a call gives the same results too."""
    big = {"model": {"name": "decoder", "width": 128}, "steps": 4}
    on_ray = islands.run(tiny(**big), out=tmp_path / "ray")
    alone = islands.run(tiny(**big), out=tmp_path / "alone", in_process=True)
    assert on_ray.summary["parameters"] * 4 > 100_000
    assert_same(on_ray, alone)


def test_two_nodes_give_the_results_of_one(cluster: Cluster, tmp_path: Path) -> None:
    """Law 10: where the workers run changes nothing; and they really run on both nodes."""
    one_node = islands.run(tiny(), out=tmp_path / "one")
    node = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    try:
        job = prepare(tiny())
        actors = Actors(job)
        try:
            nodes = actors.set_up(job)
            folder = new_folder(tmp_path / "two", "two", overwrite=False)
            summary = driver.drive(actors, job, folder, lambda progress: None)
        finally:
            actors.end()
    finally:
        cluster.remove_node(node)
    assert len(nodes) == 4
    assert len(set(nodes)) == 2
    assert_same(one_node, islands.Result(folder, summary))


@pytest.mark.usefixtures("cluster")
def test_actors_serve_one_run_after_another_and_then_end(tmp_path: Path) -> None:
    """A study keeps its actors: a second run starts from scratch in them; `end` leaves none."""
    job = prepare(tiny())
    actors = Actors(job)
    summaries = []
    for name in ("first", "second"):
        actors.set_up(job)
        folder = new_folder(tmp_path / name, name, overwrite=False)
        summaries.append(driver.drive(actors, job, folder, lambda progress: None))
    actors.end()
    assert summaries[0]["parameters_sha256"] == summaries[1]["parameters_sha256"]
    for actor in actors.workers:
        with pytest.raises(RayActorError):
            ray.get(actor.run.remote([]), timeout=30)


@pytest.mark.usefixtures("cluster")
def test_a_worker_that_raises_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    """The message names worker, island, step and cause; the results so far are readable."""
    with pytest.raises(islands.RunError, match=r"worker 2 \(oregon\) failed at step 8") as info:
        islands.run(tiny({"name": "helpers:Failing"}), out=tmp_path / "run")
    assert str(tmp_path / "run") in str(info.value)
    assert islands.Result.load(tmp_path / "run").summary["status"] == "failed"


@pytest.mark.usefixtures("cluster")
def test_a_worker_that_dies_ends_the_run(tmp_path: Path) -> None:
    """A killed process is a message, not a hang."""
    with pytest.raises(islands.RunError, match=r"worker 3 \(oregon\) died"):
        islands.run(tiny({"name": "helpers:Dying"}), out=tmp_path / "run")
    assert islands.Result.load(tmp_path / "run").summary["status"] == "failed"


@pytest.mark.usefixtures("cluster")
def test_the_link_actor_does_not_load_torch() -> None:
    """The network needs metadata only, so its process stays small."""

    def modules() -> bool:
        import sys

        import islands.actors.link

        return "torch" in sys.modules and islands.actors.link is not None

    assert not ray.get(ray.remote(num_cpus=0)(modules).remote(), timeout=60)


@pytest.mark.usefixtures("cluster")
def test_workers_are_small() -> None:
    """A decoder worker has at most 200 MB of memory to itself."""

    def pid(actor: object) -> int:  # travels by value: the actor must not import this module
        import os

        return os.getpid()

    job = prepare(tiny())
    actors = Actors(job)
    try:
        actors.set_up(job)
        pids = ray.get([actor.__ray_call__.remote(pid) for actor in actors.workers], timeout=60)
        unshared = [psutil.Process(pid).memory_full_info().uss for pid in pids]
    finally:
        actors.end()
    assert max(unshared) < 200e6
