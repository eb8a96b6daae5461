"""What a rank runs in the tests: each verb named, and the bytes that its interface sent
meanwhile.

Prints a JSON object: bytes that this host sent, by verb, beside what ``sent_bytes``
counts.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.collective.steps.travel import sent_bytes
from gradwire.contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    ReduceScatter,
)
from gradwire.runtime.transport.wire import carry_out, open_channels
from gradwire_bench.testbed.counters import own_counters

NUMEL = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
[channel] = open_channels("one verb", rank, world, 1, timedelta(minutes=2))
grad_N, equal = torch.zeros(NUMEL), (NUMEL // world,) * world
verbs = {
    "all_reduce": AllReduce(grad_N),
    "all_gather": AllGather(torch.zeros(NUMEL * world), grad_N),
    "all_to_all": AllToAll(torch.zeros(NUMEL), grad_N, equal, equal),
    "reduce_scatter": ReduceScatter(torch.zeros(NUMEL // world), grad_N),
    "broadcast": Broadcast(1, grad_N),
}
found = {}
for name, verb in verbs.items():
    carry_out([verb], [channel], straight=True)  # opens its connections
    dist.barrier()
    before = own_counters()
    carry_out([verb], [channel], straight=True)
    dist.barrier()
    found[name] = (own_counters().since(before).tx_bytes, sent_bytes(verb, rank, world))
print(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
