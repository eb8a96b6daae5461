"""The contracts: what compressors, collectives and exchanges are and declare.

Every other room builds on this one: payloads, verbs, specs, states and the registries
are here too. It knows no algorithm by name, no device and no driver.
"""

from .collective import Collective as Collective
from .collective import Dimensions as Dimensions
from .collective import Needs as Needs
from .compressor import MOST_COUNTED as MOST_COUNTED
from .compressor import Compressor as Compressor
from .compressor import Layout as Layout
from .compressor import Memory as Memory
from .compressor import Residual as Residual
from .compressor import State as State
from .compressor import Traits as Traits
from .exchange import Copies as Copies
from .exchange import EncodesTensors as EncodesTensors
from .exchange import Exchange as Exchange
from .exchange import Result as Result
from .exchange import synchronise_alone as synchronise_alone
from .figures import Imbalance as Imbalance
from .figures import Selection as Selection
from .member import Member as Member
from .shards import Shards as Shards
