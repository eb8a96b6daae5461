"""gradwire: data-parallel PyTorch training that stays fast on slow networks.

``import gradwire as gw``. Names are looked up at first use, so that the command line
does not wait for torch to print its help; for type checkers they stand in
``__init__.pyi``.
"""

from importlib import import_module
from typing import Any

from .version import __version__ as __version__

_PATHS = [
    "contract.Compressor",
    "contract.Exchange",
    "contract.Layout",
    "contract.Traits",
    "contract.collective.Collective",
    "contract.payload.Field",
    "contract.payload.Format",
    "contract.payload.Payload",
    "contract.spec.TensorSpec",
    "contract.trace.span.Span",
    "contract.trace.span.Trace",
    "errors.InvalidSetting",
    "errors.LoopMistake",
    "errors.RankFailed",
    "errors.RanksDiffer",
    "errors.RanksLost",
    "exchange.by_name.exchange_for",
    "exchange.by_name.run_local",
    "exchange.error_feedback.residuals",
    "exchange.error_feedback.with_error_feedback",
    "exchange.natural.with_natural_sparsity",
    "exchange.pair.pair",
    "planning.simulation.timeline.simulate",
    "planning.data.cluster.Cluster",
    "planning.data.plan.Plan",
    "planning.data.profile.Profile",
    "planning.data.sparsity.SparsityProfile",
    "measure.layers.profile",
    "planning.make_plan.plan",
    "runtime.attach.attach",
    "runtime.handle.Handle",
    "runtime.local_steps.local_steps.local_steps",
    "runtime.serve.serve",
    "runtime.settings.FailurePolicy",
    "runtime.settings.Options",
    "runtime.state.redistribution.redistribute",
    "runtime.step.figures.mean_residual_norm",
]
_MODULES = {
    "catalogue": "planning.catalogue",
    "fsdp": "runtime.fsdp",
    "pilot": "pilot",
    "planner": "planning.planner",
    "recipes": "runtime.local_steps.recipes",
}
_HOME_OF = {name: home for home, _, name in (path.rpartition(".") for path in _PATHS)}
_OF_LAB = [
    "adapt",
    "deep_gradient_compression",
    "measure_sparsity",
    "with_clipping",
    "with_decoupled_momentum",
    "with_density_warmup",
    "with_measured_scheme",
    "with_momentum_correction",
    "with_warmup",
]
__all__ = [
    "__version__",
    "collective",
    "compress",
    "errors",
    *_OF_LAB,
    *_MODULES,
    *_HOME_OF,
]


def __getattr__(name: str) -> Any:
    if name in _OF_LAB:
        registry = import_module(f"{__name__}.contract.registry")
        return registry.extension(name, f"gw.{name}")
    home = f"{__name__}.{_HOME_OF.get(name) or _MODULES.get(name, name)}"
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        if error.name != home:
            raise
        errors = import_module(f"{__name__}.errors")
        raise errors.UnknownName("part of gradwire", name, __all__) from None
    attribute = globals()[name] = getattr(module, name) if name in _HOME_OF else module
    return attribute
