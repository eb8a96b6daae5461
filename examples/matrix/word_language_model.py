"""An LSTM with tied weights and a carried state, whose parameters are updated by hand."""

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.drop = nn.Embedding(41, 24), nn.Dropout(0.2)
        self.rnn = nn.LSTM(24, 24, 2, dropout=0.2)
        self.decoder = nn.Linear(24, 41)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids, state):
        out, state = self.rnn(self.drop(self.encoder(ids)), state)
        return self.decoder(self.drop(out)), state


run = Run()
dist.init_process_group("gloo")
model = Words()
kept = {"model": model}
kept["gradwire"] = gw.attach(model, "none")  # gradwire
model = DDP(model)  # native
state = None
for step in run.steps(kept):
    ids = run.words(step, 7, 4, below=41)
    model.zero_grad()
    if step % 3 == 0:
        state = (torch.zeros(2, 4, 24), torch.zeros(2, 4, 24))
    state = tuple(one.detach() for one in state)
    logits, state = model(ids[:-1], state)
    F.cross_entropy(logits.flatten(0, 1), ids[1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-2.0)
