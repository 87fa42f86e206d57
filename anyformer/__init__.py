"""anyformer: a fixed transformer can be any transformer; its input embedding is the program.

The five verbs: :func:`compile`, :func:`run`, :func:`verify`, :func:`specialize`, :func:`cost`.
"""

from anyformer import operators as operators
from anyformer import tasks as tasks
from anyformer.backbones import MACHINES as MACHINES
from anyformer.backbones import Chain as Chain
from anyformer.backbones import Composed as Composed
from anyformer.backbones import Composition as Composition
from anyformer.backbones import Cost as Cost
from anyformer.backbones import LiteralTransformer as LiteralTransformer
from anyformer.backbones import Looped as Looped
from anyformer.backbones import Machine as Machine
from anyformer.backbones import PathTree as PathTree
from anyformer.backbones import Random as Random
from anyformer.backbones import StoredProgram as StoredProgram
from anyformer.bank import ProgramBank as ProgramBank
from anyformer.classes import NetworkClass as NetworkClass
from anyformer.compiling import compile as compile
from anyformer.costs import cost as cost
from anyformer.costs import lower_bound as lower_bound
from anyformer.errors import AnyformerError as AnyformerError
from anyformer.errors import OutsideClass as OutsideClass
from anyformer.exporting import write_huggingface as write_huggingface
from anyformer.generating import generate as generate
from anyformer.maps import ConstantMap as ConstantMap
from anyformer.maps import DenseMap as DenseMap
from anyformer.maps import DiagonalMap as DiagonalMap
from anyformer.maps import IdentityMap as IdentityMap
from anyformer.maps import LowRankMap as LowRankMap
from anyformer.network import Branch as Branch
from anyformer.network import Network as Network
from anyformer.network import Stage as Stage
from anyformer.operators import Cache as Cache
from anyformer.program import Placement as Placement
from anyformer.program import Program as Program
from anyformer.program import load as load
from anyformer.rasp.machine import SequenceSimulator as SequenceSimulator
from anyformer.running import run as run
from anyformer.specialising import Specialization as Specialization
from anyformer.specialising import specialize as specialize
from anyformer.targets.huggingface import read_huggingface as read_huggingface
from anyformer.targets.loading import load_target as load_target
from anyformer.targets.reading import network_class as network_class
from anyformer.targets.reading import read as read
from anyformer.targets.transformer import Transformer as Transformer
from anyformer.targets.transformer import TransformerConfig as TransformerConfig
from anyformer.verifying import Verdict as Verdict
from anyformer.verifying import VerificationFailed as VerificationFailed
from anyformer.verifying import verify as verify

__version__ = "0.1.0"
