import torch
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright import Cluster, auto_parallelize, distributed

with distributed("gloo"):  # under torchrun; "nccl" on GPUs
    model, ids = GPT2LMHeadModel(GPT2Config(n_layer=4)), torch.arange(8 * 256).view(8, 256)
    batch = {"input_ids": ids, "labels": ids}
    result = auto_parallelize(model, Cluster.local(4), example_inputs=batch, global_batch_size=8)
    optimizer = torch.optim.AdamW(result.parameters(), lr=3e-4)
    for _ in range(10):
        optimizer.zero_grad()
        loss = result.train_step(batch)  # global batch in, mean loss out
        optimizer.step()
