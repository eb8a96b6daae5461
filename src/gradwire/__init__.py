"""gradwire: data-parallel PyTorch training that stays fast on slow networks, honestly measured.

``import gradwire as gw``. Names are looked up at first use, so that the command line does not wait
for torch to print its help; for type checkers they stand in ``__init__.pyi``. Modules are found the
same way, whatever was imported before, so no name here is that of a module.
"""

from importlib import import_module
from typing import Any

from .version import __version__ as __version__

_PATHS = """
    contract.collective.Collective contract.Compressor contract.Exchange contract.Layout
    contract.Traits data.cluster.Cluster data.profile.Profile
    errors.InvalidSetting errors.LoopMistake errors.RankFailed errors.RanksDiffer errors.RanksLost
    exchange.exchange_for pairing.pair error_feedback.residuals exchange.run_local
    error_feedback.with_error_feedback measure.layers.profile measure.sparsity.measure_sparsity
    data.sparsity.SparsityProfile payload.Field payload.Format payload.Payload
    planning.plan.plan data.plan.Plan runtime.attach.attach runtime.redistribution.redistribute
    runtime.accounting.mean_residual_norm runtime.handle.Handle runtime.local_steps.local_steps
    sim.timeline.simulate spec.TensorSpec trace.span.Span trace.span.Trace
    wrap.adapt.adapt wrap.clipping.with_clipping wrap.decoupled_momentum.with_decoupled_momentum
    wrap.deep_gradient_compression.deep_gradient_compression wrap.density_warmup.with_density_warmup
    wrap.measured_scheme.with_measured_scheme wrap.momentum.with_momentum_correction
    wrap.natural.with_natural_sparsity wrap.warmup.with_warmup
"""
_HOME_OF = {name: home for home, _, name in (path.rpartition(".") for path in _PATHS.split())}
__all__ = ["__version__", "collective", "compress", "errors", "fsdp", "pilot", *_HOME_OF]


def __getattr__(name: str) -> Any:
    home = f"{__name__}.{_HOME_OF.get(name, name)}"
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        if error.name != home:
            raise
        from .errors import UnknownName

        raise UnknownName("part of gradwire", name, __all__) from None
    found = globals()[name] = getattr(module, name) if name in _HOME_OF else module
    return found
