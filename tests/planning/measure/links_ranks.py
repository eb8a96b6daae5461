"""The program of each rank of test_links, started by ``python -m``."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.planning.data.cluster import CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.measure.links import host_share, measure_cluster
from gradwire.runtime.failure.membership import join
from gradwire.runtime.step.engine import Engine

SIZES_BYTES = (1000, 64_000, 4_000_000)


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    engine = Engine(
        join(None), num_channels=2, timeout=timedelta(seconds=60), on_span=lambda span: None
    )
    # Every rank brings other figures of codecs: rank 0's must come out everywhere.
    line = LineFit(alpha_s=rank, per_unit_s=1.0)
    codecs = {"own": CodecFit(encode=line, decode=line, merge=line)}
    told: list[float] = []
    cluster = measure_cluster(
        engine,
        sizes_bytes=SIZES_BYTES,
        budget_s=0.02,
        codecs=codecs,
        advance=lambda amount, note: told.append(amount),
    )
    share = host_share(engine, budget_s=0.02)
    cluster.save(folder / f"cluster-{rank}.json")
    (folder / f"facts-{rank}").write_text(f"{sum(told)} {share}")
    dist.barrier()
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
