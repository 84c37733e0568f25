"""Runs a stage's instruction stream: the same one that the simulator prices.

Receives are posted ahead of the instruction that needs them, sends are started and left to finish;
a stage waits only for its own next message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from costmodel.schedule import Action, Instruction
from executor.stage import Pass, StageProgram
from executor.transfer import Channel

LOOKAHEAD = 2  # receives posted ahead of the one being waited for

Key = tuple[Action, int, int]  # (receive action, peer, micro-batch)


class PipelineRun:
    """One training step of one stage."""

    def __init__(
        self,
        program: StageProgram,
        stream: Sequence[Instruction],
        channels: Mapping[tuple[Action, int], Mapping[str, Channel]],
        inputs: Callable[[int], Mapping[str, torch.Tensor]],
        counts: Mapping[str, torch.Tensor],
        rng: Callable[[int], tuple[int, int]],
    ) -> None:
        self.program, self.stream, self.channels = program, stream, channels
        self.inputs, self.counts, self.rng = inputs, counts, rng
        self.passes: dict[int, Pass] = {}
        self.activations: dict[int, dict[str, torch.Tensor]] = {}
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.input_gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.posted: dict[Key, dict[str, list[Any]]] = {}
        self.sending: list[tuple[Any, torch.Tensor]] = []
        self.losses: list[torch.Tensor] = []
        receives = (Action.RECV_ACTIVATION, Action.RECV_GRADIENT)
        self.coming = deque(i for i in stream if i.action in receives)

    def run(self) -> list[torch.Tensor]:
        """Execute the stream; returns the micro-batches' losses (last stage) in order."""
        handlers = {
            Action.FORWARD: self._forward,
            Action.BACKWARD: self._backward,
            Action.SEND_ACTIVATION: self._send,
            Action.RECV_ACTIVATION: self._receive,
            Action.SEND_GRADIENT: self._send,
            Action.RECV_GRADIENT: self._receive,
        }
        for instruction in self.stream:
            handler = handlers.get(instruction.action)
            if handler is not None:
                handler(instruction)
        for work, _ in self.sending:
            work.wait()
        return self.losses

    def _forward(self, instruction: Instruction) -> None:
        k = instruction.microbatch
        received = self.activations.pop(k, {})
        done = self.program.forward(self.inputs(k), received, self.counts, self.rng(k))
        self.passes[k] = done
        if self.program.loss is not None:
            self.losses.append(done.produced[self.program.loss].detach())

    def _backward(self, instruction: Instruction) -> None:
        k = instruction.microbatch
        done = self.passes.pop(k)
        # one at a time: their sends follow at once, and hold what they still need
        self.input_gradients = {k: self.program.backward(done, self.gradients.pop(k, {}))}

    def _send(self, instruction: Instruction) -> None:
        k, peer = instruction.microbatch, instruction.peer
        assert peer is not None
        forward = instruction.action is Action.SEND_ACTIVATION
        source = self.passes[k].produced if forward else self.input_gradients[k]
        for name, channel in self.channels[instruction.action, peer].items():
            self.sending += channel.send(source[name])
        self.sending = [(work, x) for work, x in self.sending if not work.is_completed()]

    def _receive(self, instruction: Instruction) -> None:
        self._post_ahead(instruction)
        k, peer = instruction.microbatch, instruction.peer
        assert peer is not None
        posted = self.posted.pop(_key(instruction))
        channels = self.channels[instruction.action, peer]
        store = self.activations if instruction.action is Action.RECV_ACTIVATION else self.gradients
        into = store.setdefault(k, {})
        for name, works in posted.items():
            received = channels[name].finish(works)
            into[name] = into[name] + received if name in into else received

    def _post_ahead(self, upto: Instruction) -> None:
        """Post this receive and the next few, in stream order."""
        while self.coming and (_key(upto) not in self.posted or len(self.posted) <= LOOKAHEAD):
            following = self.coming.popleft()
            assert following.peer is not None
            channels = self.channels[following.action, following.peer]
            self.posted[_key(following)] = {n: channel.post() for n, channel in channels.items()}


def _key(instruction: Instruction) -> Key:
    assert instruction.peer is not None
    return instruction.action, instruction.peer, instruction.microbatch
