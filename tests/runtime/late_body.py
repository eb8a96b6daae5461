from __future__ import annotations
import traceback, time
from datetime import timedelta
import torch
from gradwire.runtime.engine import Engine
from gradwire.runtime.membership import join
from gradwire.runtime.messages import Message, ParamRange
from gradwire.runtime.synchroniser import Synchroniser
from tests.laws.cases import own_exchanges, pairs
from tests.runtime import late
from gradwire.error_feedback import residuals
from gradwire.exchange import exchange_for

SHAPES = {"a": (30, 20), "b": (33,), "c": (7, 11)}


def step_of(sync, step, rank, device):
    gen = torch.Generator().manual_seed(100 * step + rank)
    sync.begin(step)
    grads = {}
    for name, shape in SHAPES.items():
        g = torch.randn(shape, generator=gen).to(device)
        grads[name] = g
        sync.ready(name, g)
    sync.close()
    sync.finish()
    return grads


def make(exchange, rank, world, device):
    params = {n: torch.zeros(s, device=device) for n, s in SHAPES.items()}
    ranges = [ParamRange.whole(n, p) for n, p in params.items()]
    return [
        Message(0, ranges[:2], exchange, rank, world),
        Message(1, ranges[2:], exchange, rank, world),
    ], params


def compare(rank, world, start, stop):
    device = late.install()
    every = [*pairs(), *own_exchanges()][start:stop]
    out = []
    for ex in every:
        try:
            t = time.time()
            engine = Engine(
                join(None), num_channels=2, timeout=timedelta(seconds=20), on_span=lambda s: None
            )
            device.reset(None)
            found = {}
            syncs = {}
            for dev in ("cpu", "late"):
                messages, params = make(ex, rank, world, dev)
                sync = Synchroniser(engine, messages, params)
                t1 = time.time()
                for step in range(2):
                    grads = step_of(sync, step, rank, dev)
                found[dev] = {n: g.cpu() for n, g in grads.items()}
                syncs[dev] = messages, sync
                t2 = time.time() - t1
            on = [str(m.device) for m in messages]
            bad = [n for n in SHAPES if not torch.equal(found["cpu"][n], found["late"][n])]
            res = [
                (a - b.cpu()).abs().max().item()
                for ma, mb in zip(syncs["cpu"][0], syncs["late"][0])
                for a, b in zip(residuals(ma.state).values(), residuals(mb.state).values())
            ]
            if bad or device.wrong or any(res):
                out.append(
                    f"{ex!r} bits differ {bad} res {res} wrong {device.wrong[:2]} {len(device.wrong)}"
                )
            st = sync.streams.staging
            if on[0] == "cpu":
                out.append("HOST " + repr(ex))
            engine.finish_and_close()
        except BaseException as e:
            out.append(
                f"{ex!r} RAISED {type(e).__name__} {str(e)[:300]} @ "
                + " < ".join(
                    f"{f.filename.split('/gradwire/')[-1]}:{f.lineno}"
                    for f in traceback.extract_tb(e.__traceback__)[-5:]
                )
            )
            engine.close()
    return out
