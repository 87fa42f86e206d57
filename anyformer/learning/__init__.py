"""Learning: ordinary modules, runs in folders that resume, and sweeps of them (docs/runs.md)."""

from anyformer.learning.frozen_machine import FrozenMachine as FrozenMachine
from anyformer.learning.models import FullyTrained as FullyTrained
from anyformer.learning.models import Model as Model
from anyformer.learning.recommended import recommended_model as recommended_model
from anyformer.learning.recommended import recommended_training as recommended_training
from anyformer.learning.reprogrammed import Reprogrammed as Reprogrammed
from anyformer.learning.reprogrammed import load_reprogramming as load_reprogramming
from anyformer.learning.runs import Progress as Progress
from anyformer.learning.runs import RunConfig as RunConfig
from anyformer.learning.runs import RunResult as RunResult
from anyformer.learning.runs import read_run as read_run
from anyformer.learning.runs import run_training as run_training
from anyformer.learning.runs import stored_config as stored_config
from anyformer.learning.sinks import Sink as Sink
from anyformer.learning.sinks import TrackioSink as TrackioSink
from anyformer.learning.sweeps import RayExecutor as RayExecutor
from anyformer.learning.sweeps import SweepResult as SweepResult
from anyformer.learning.sweeps import sweep as sweep
from anyformer.learning.training import Diverged as Diverged
from anyformer.learning.training import History as History
from anyformer.learning.training import TrainingConfig as TrainingConfig
from anyformer.learning.training import evaluate as evaluate
from anyformer.learning.training import train as train
