"""Seconds of kernels: products, attention, streams, collectives, sends."""

from meshwright.costmodel.kernels.collectives import (
    Group,
    bytes_sent,
    collective_time,
    exchange_seconds,
    exchanged_bytes,
    group_for,
    p2p_time,
    reached_part,
)
from meshwright.costmodel.kernels.compute import attention_seconds, matmul_seconds, stream_seconds
from meshwright.costmodel.kernels.transfers import Hop, Hops, OpProfile, crosses_node, send_seconds
