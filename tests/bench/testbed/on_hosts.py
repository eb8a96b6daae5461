"""What a rank runs in the tests: two steps of a model that is attached to torchrun's hosts.

Prints a JSON object: the bytes that its host's link sent in the second step, for one of its ranks.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire_bench.testbed.counters import own_counters

NUMEL = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.Linear(NUMEL // 100, 100, bias=False)
handle = gw.attach(model, gw.compress.none(), mesh="torchrun")
sent = []
for _ in range(2):
    dist.barrier()
    before = own_counters()
    model.zero_grad()
    model(torch.ones(1, NUMEL // 100)).sum().backward()
    dist.barrier()
    sent.append(own_counters().since(before).tx_bytes)
print(json.dumps(sent[1]))
handle.detach()
dist.barrier()
dist.destroy_process_group()
