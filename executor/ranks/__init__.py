"""Ranks: launch, meshes and process groups, watchdog, agreement."""

from meshwright.executor.ranks import background, launch
from meshwright.executor.ranks.background import Background
from meshwright.executor.ranks.launch import device_here, distributed, world_size
from meshwright.executor.ranks.meshes import (
    BACKWARD,
    FORWARD,
    Edge,
    Holders,
    Place,
    StageMesh,
    device_mesh,
    join_groups,
    one_way_groups,
    pair_groups,
    single_process,
    stage_meshes,
)
from meshwright.executor.ranks.object_collectives import (
    BESIDE,
    OBJECTS,
    WAITING,
    all_gather_object,
    broadcast_object,
    gather_object,
    gloo_group,
    phase,
    raising_runtime_error,
    run_on_all,
    run_on_first,
    together,
)
from meshwright.executor.ranks.replicas import (
    RIDING,
    BatchCheck,
    check_equal,
    make_equal,
    same_random_state,
)
from meshwright.executor.ranks.stop_requests import StopRequests
from meshwright.executor.ranks.watchdog import EVALUATING, PREPARING, progress
from meshwright.executor.ranks.worlds import ReplicaWorld, replica_world
