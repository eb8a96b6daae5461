"""ddp: PyTorch's buckets, 1 MiB first and then 25 MiB, as gradients come.

Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 3.2.3; torch's
    compute_bucket_assignment_by_size as called when DDP rebuilds its buckets after the
    first step.
Differences from the paper: gradients are taken to come in the reverse of the profile's
    order. Each dtype fills buckets of its own (as in torch); unfilled buckets go out
    last, in the order in which their dtypes first came. Torch follows a hash table
    there.
Settings: first_bucket_bytes, bucket_bytes; a bucket is closed by the tensor that
reaches its size.
Order: as buckets are filled; the next forward starts when all communication has ended.
"""

from collections import Counter
from functools import partial

from ..buckets import check_bytes
from ..data.cluster import Cluster
from ..data.plan import Chunk, Plan, PlannedMessage
from ..data.profile import Profile
from ..planner_settings import SIZES

SEARCH = {"first_bucket_bytes": SIZES, "bucket_bytes": SIZES}


def ddp(
    profile: Profile,
    cluster: Cluster,
    *,
    first_bucket_bytes: int = 2**20,
    bucket_bytes: int = 25 * 2**20,
) -> Plan:
    """The plan of DistributedDataParallel.

    Args:
        profile: The model's layers.
        cluster: Ranks and links, which change nothing here.
        first_bucket_bytes: Bytes at which the first bucket is closed, by default 1 MiB.
        bucket_bytes: Bytes at which a later bucket is closed, by default 25 MiB.

    Returns:
        The plan.

    Raises:
        InvalidSetting: A size is not a positive whole number.

    >>> from gradwire import catalogue
    >>> profile = catalogue.load("vgg16")
    >>> cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> [len(message.chunks) for message in ddp(profile, cluster).messages][:2]
    [2, 2]
    """
    check_bytes("first_bucket_bytes", first_bucket_bytes)
    check_bytes("bucket_bytes", bucket_bytes)
    closed = []
    filling: dict[str, list[Chunk]] = {}
    filled_bytes = Counter[str]()
    limit_bytes: dict[str, int] = {}
    in_order = [t for layer in profile.layers for t in layer.tensors if t.numel]
    for tensor in reversed(in_order):
        key = tensor.dtype
        chunk = Chunk(tensor=tensor.name, start=0, stop=tensor.numel)
        filling.setdefault(key, []).append(chunk)
        filled_bytes[key] += tensor.size_bytes
        if filled_bytes[key] >= limit_bytes.get(key, first_bucket_bytes):
            closed.append(filling.pop(key))
            filled_bytes[key] = 0
            limit_bytes[key] = bucket_bytes
    return Plan(
        planner="ddp",
        model=profile.model,
        settings={
            "first_bucket_bytes": first_bucket_bytes,
            "bucket_bytes": bucket_bytes,
        },
        messages=tuple(
            PlannedMessage(chunks=tuple(chunks))
            for chunks in [*closed, *filling.values()]
        ),
    )


EXAMPLES = (ddp, partial(ddp, first_bucket_bytes=64, bucket_bytes=256))
