"""A GPT under DDP: accumulation by a flag, autocast, clipping, a cosine schedule, tied weights."""

import math

import torch
import torch.distributed as dist
from one_run import Run
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw  # gradwire

WORDS, LENGTH, WIDTH, ACCUMULATED = 61, 12, 32, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        wide = 4 * WIDTH
        self.mlp = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids, targets):
        x = self.dropout(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


run = Run()
dist.init_process_group("gloo")
raw = GPT()
decayed = [p for p in raw.parameters() if p.dim() >= 2]
others = [p for p in raw.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
model = DDP(raw)
handle = gw.attach(model, "none", optimizer=optimizer)  # gradwire
kept = {"model": raw, "optimizer": optimizer}
kept["gradwire"] = handle  # gradwire
for step in run.steps(kept):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 + 0.5 * (1 + math.cos(math.pi * step / run.num_steps)) * 9e-3
    for part in range(ACCUMULATED):
        model.require_backward_grad_sync = part == ACCUMULATED - 1
        ids = run.words(step * ACCUMULATED + part, 4, LENGTH + 1, below=WORDS)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids[:, :-1], ids[:, 1:]) / ACCUMULATED
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
