"""``bench device``'s part ``offload``: a tensor selected on the device, or by the host
beside it.

Source: SSFusion (ICDE 2026), table III (DGC of 10 KB to 10,000 KB by GPU and CPU) and
section IV-C.

Both ways are the runtime's own, with error feedback, from the gradient on the device to
entries there. The host's is the sum's copy to pinned memory, the selection, and the
entries' copy back. The seconds are those of a whole way, by the host's clock. What a
way takes of the backward pass shows in a loop of matrix products on another stream: how
much longer the loop takes with one selection after another beside it, by the selections
that were made.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from gradwire.cli.report.table import Row
from gradwire.contract import Member
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.error_feedback import encoder_state, with_error_feedback
from gradwire.runtime.device.devices import kept_on
from gradwire.runtime.device.streams import Offload, SideStream, Streams
from gradwire_lab.compress.selective import selective

PAPER_S = {
    10_000: (0.85e-3, 1.49e-3),
    100_000: (0.89e-3, 1.81e-3),
    1_000_000: (1.06e-3, 3.22e-3),
    10_000_000: (1.82e-3, 8.74e-3),
}
"""Seconds on a GPU and on a CPU by the bytes of a tensor, as table III has them."""
SIZES_BYTES = tuple(PAPER_S)
DENSITY = 0.01
Way = Callable[[], None]


def rows(
    device: torch.device,
    sizes_bytes: Sequence[int],
    rounds: int,
    *,
    width: int = 2048,
    loop_s: float = 0.05,
) -> list[Row]:
    """A row for each size; on a CPU, which has no streams, it is of the host's
    selection alone.

    The loop beside which selections are made multiplies matrices of ``width``, for
    ``loop_s``.
    """
    side = Streams().side(device)
    rows: list[Row] = []
    for size_bytes in sizes_bytes:
        selection = _Selection(device, size_bytes // 4)
        row: Row = {"name": f"offload/{size_bytes / 1000:g} KB"}
        if side is None:
            row["on_host_s"] = _median_s(selection.select, rounds)
        else:
            ways = {
                "host": selection.by_host(side),
                "device": selection.by_device(side),
            }
            row |= {
                f"on_{name}_s": _median_s(way, rounds) for name, way in ways.items()
            }
            row |= _beside(side, ways, rounds, width, loop_s)
        if size_bytes in PAPER_S:
            row["paper_device_s"], row["paper_host_s"] = PAPER_S[size_bytes]
        rows.append(row)
    return rows


class _Selection:
    """DGC of one tensor, as a message of it alone is encoded."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self._encoder = selective(sparsifier="dgc", density=DENSITY, num_dense=0)
        kept = with_error_feedback(self._encoder)
        self._me = Member(0, 2)
        spec = TensorSpec("gradient", numel, shapes=((numel,),), device=device.type)
        grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        with kept_on(device):
            self._state = encoder_state(kept.init(spec, 2))
            self._grad_N = grad_N.to(device)

    def select(self) -> None:
        """Encodes the tensor where it lies."""
        inner, residual_N = self._state
        self._encoder.encode_ahead(self._me, inner, 0, self._grad_N, residual_N)
        self._me.ahead.clear()

    def by_device(self, side: SideStream) -> Way:
        """The way on the device's side stream, up to its end there."""
        launch = side.on(self.select)

        def way() -> None:
            launch()
            side.record_event().recorded.synchronize()

        return way

    def by_host(self, side: SideStream) -> Way:
        """The way through the host, up to its end on the device."""

        def way() -> None:
            inner, residual_N = self._state
            copies = self._encoder.encode_on_host(
                self._me, inner, 0, self._grad_N, residual_N
            )
            offload = Offload(copies, 0, "gradient", side)
            offload.leave()
            offload.encode()
            self._me.ahead.clear()
            side.record_event().recorded.synchronize()

        return way


def _median_s(way: Way, rounds: int) -> float:
    """The median seconds of a way; the first compiles and allocates, and does not
    count.
    """
    taken = []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        way()
        taken.append(time.perf_counter() - start_s)
    return median(taken[1:])


def _beside(
    side: SideStream, ways: dict[str, Way], rounds: int, width: int, loop_s: float
) -> Row:
    """The loop's seconds by itself, and what each selection beside it costs it, by
    way.
    """
    loop = _Loop(side, width)
    count = max(1, round(loop_s / loop.seconds(8) * 8))
    alone = list[float]()
    costs = {name: list[float]() for name in ways}
    for _ in range(rounds):
        alone_s = loop.seconds(count)
        alone.append(alone_s)
        for name, way in ways.items():
            taken_s, num_made = loop.seconds_beside(count, way)
            costs[name].append((taken_s - alone_s) / num_made)
    return {
        "loop_s": median(alone),
        **{
            f"loop_per_selection_on_{name}_s": median(seconds)
            for name, seconds in costs.items()
        },
    }


class _Loop:
    """Matrix products on the stream that is current, as the kernels of a backward pass
    are.
    """

    def __init__(self, side: SideStream, width: int) -> None:
        self._kind = side.kind
        self._device = side.device
        self._factor, self._product = (
            torch.zeros(width, width, device=side.device) for _ in "ab"
        )
        self.seconds(1)

    def seconds(self, count: int) -> float:
        """The seconds of so many products, from the first launch to the last one's
        end.
        """
        stream = self._kind.current_stream(self._device)
        self._kind.record(stream).synchronize()
        start_s = time.perf_counter()
        for _ in range(count):
            torch.mm(self._factor, self._factor, out=self._product)
        self._kind.record(stream).synchronize()
        return time.perf_counter() - start_s

    def seconds_beside(self, count: int, way: Way) -> tuple[float, int]:
        """The same while a thread makes one selection after another; and how many it
        made.
        """
        begun = threading.Event()
        over = threading.Event()

        def select() -> int:
            num_made = 0
            while not over.is_set():
                begun.set()
                way()
                num_made += 1
            return num_made

        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(select)
            begun.wait()
            try:
                taken_s = self.seconds(count)
            finally:
                over.set()
            return taken_s, made.result()
