"""Data of a run: each rank loads its own rows of every global batch; documents packed to rows."""

from meshwright.data.loader import DataLoader, StreamLoader, data_loader, first_samples, is_stream
from meshwright.data.loader_arguments import collated
from meshwright.data.packing import PackedStream, Packing, packed
