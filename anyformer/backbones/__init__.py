"""Backbones: fixed machines, written from a network class, and the registry of them."""

from anyformer.backbones.chain import Chain as Chain
from anyformer.backbones.composed import Composed as Composed
from anyformer.backbones.composition import Composition as Composition
from anyformer.backbones.frozen import FrozenMasked as FrozenMasked
from anyformer.backbones.frozen import FrozenRandom as FrozenRandom
from anyformer.backbones.literal import LiteralTransformer as LiteralTransformer
from anyformer.backbones.looped import Looped as Looped
from anyformer.backbones.machine import Cost as Cost
from anyformer.backbones.machine import Machine as Machine
from anyformer.backbones.path_tree import PathTree as PathTree
from anyformer.backbones.random_backbone import Random as Random
from anyformer.backbones.registry import MACHINES as MACHINES
from anyformer.backbones.registry import register_machine as register_machine
from anyformer.backbones.stored import StoredProgram as StoredProgram
