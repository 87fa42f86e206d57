"""Which attention is a universal approximator, with which symmetry, in how many layers: verdicts that say how strong they are.

print(certify("softmax", tokens=5, dim=2, layers=1, group="symmetric"))
"""

from anyformer.approximation.architecture import Architecture as Architecture
from anyformer.approximation.architecture import ColourBias as ColourBias
from anyformer.approximation.architecture import Layer as Layer
from anyformer.approximation.architecture import Positions as Positions
from anyformer.approximation.certify import certify as certify
from anyformer.approximation.designs import Averaged as Averaged
from anyformer.approximation.designs import EquivariantAttention as EquivariantAttention
from anyformer.approximation.designs import equivariant_attention as equivariant_attention
from anyformer.approximation.families import FAMILIES as FAMILIES
from anyformer.approximation.families import family as family
from anyformer.approximation.feedforward import FeedForward as FeedForward
from anyformer.approximation.feedforward import GatedFeedForward as GatedFeedForward
from anyformer.approximation.feedforward import feed_forward_condition as feed_forward_condition
from anyformer.approximation.groups import Group as Group
from anyformer.approximation.groups import cyclic as cyclic
from anyformer.approximation.groups import dihedral as dihedral
from anyformer.approximation.groups import grid_translations as grid_translations
from anyformer.approximation.groups import product as product
from anyformer.approximation.groups import reflection as reflection
from anyformer.approximation.groups import symmetric as symmetric
from anyformer.approximation.groups import trivial as trivial
from anyformer.approximation.groups import wreath as wreath
from anyformer.approximation.testing import assert_equivariant as assert_equivariant
from anyformer.approximation.testing import assert_universal as assert_universal
from anyformer.approximation.verdict import Claim as Claim
from anyformer.approximation.verdict import Hypothesis as Hypothesis
from anyformer.approximation.verdict import LayerBounds as LayerBounds
from anyformer.approximation.verdict import NotCertified as NotCertified
from anyformer.approximation.verdict import Verdict as Verdict
