"""Errors of running a plan: each class has the fields that all of its errors share."""

from __future__ import annotations

from meshwright.profiles.inputs import MeshwrightError


class StateError(MeshwrightError, RuntimeError):
    """A call that the model, its ranks or this machine are not ready for."""

    CODE = "MW301"
    PLACE = "the parallel model"
    LEGAL = "calls on a model that has weights, is as it was planned, and runs on the plan's ranks"
    WAY_OUT = "give it weights, undo what was changed since, or call auto_parallelize again"


class BatchError(MeshwrightError):
    """A batch that the plan is not for."""

    CODE = "MW303"
    PLACE = "batch"
    LEGAL = "a batch like example_inputs, the same on every rank"
    WAY_OUT = "give one, or plan again with example_inputs like it"


class OptimizerError(MeshwrightError):
    """An optimizer, or an option of its step, that can't be used with the model."""

    CODE = "MW304"
    PLACE = "optimizer"
    LEGAL = "an optimizer over the result's parameters(), which needs no closure"
    WAY_OUT = "make it over those"


class RehearsalError(MeshwrightError):
    """A rehearsal that can't be run, or that found what would fail on ranks."""

    CODE = "MW310"
    PLACE = "rehearse"
    LEGAL = "one process, and a model and an optimizer that read no value of a tensor"
    WAY_OUT = "rehearse without torchrun, or with another optimizer="


class SavedError(MeshwrightError):
    """A checkpoint or file of weights that is not for this model, or a path that can't be one."""

    CODE = "MW401"
    PLACE = "the checkpoint, or the file of weights"
    LEGAL = "a folder that save_checkpoint wrote of this model, or files of weights that fit it"
    WAY_OUT = "give another path, or load what fits by load_weights or load_state_dict"


class NotThereError(SavedError, FileNotFoundError):
    """A path with nothing at it, which a run that begins anew may take as it is."""

    CODE = "MW402"
    LEGAL = "a folder that save_checkpoint wrote, or files of weights"
    WAY_OUT = "give another path"


class NoCheckpointError(SavedError):
    """A folder that is there, and that no save wrote."""

    CODE = "MW403"
    LEGAL = "a folder that save_checkpoint wrote"
    WAY_OUT = "give another path; files of weights are read by load_weights"


class DamagedError(SavedError, RuntimeError):
    """A file that is not as it was saved, or that no save wrote."""

    CODE = "MW404"
    LEGAL = "files as they were saved"
    WAY_OUT = "load an earlier checkpoint, or get the file anew from its source"


class UnwrittenError(SavedError, RuntimeError):
    """A save that failed; the earlier one, if there was any, is whole."""

    CODE = "MW405"
    LEGAL = "a folder on a file system with room, that every rank can write to"
    WAY_OUT = "make room, or save to another path"


class StateDictError(MeshwrightError):
    """A state_dict() of something else than what it is loaded into."""

    CODE = "MW406"
    PLACE = "the argument of a load_state_dict"
    LEGAL = "what state_dict() of the same kind of object, over the same data, returned"
    WAY_OUT = "give that, or leave the state out to begin anew"
