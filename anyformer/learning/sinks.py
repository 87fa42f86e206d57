"""Where figures go besides ``metrics.jsonl``: a sink hears of the run's begin, of every evaluation, and of its end.

``metrics.jsonl`` stays the source of truth: a run that was killed and resumed tells its sinks some steps twice.
"""

import logging
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from typing import Any, Protocol, runtime_checkable

from anyformer.errors import AnyformerError

LOG = logging.getLogger("anyformer")


@runtime_checkable
class Sink(Protocol):
    """Three verbs, which trackio, wandb and tensorboard all have in some form."""

    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        """The run called ``name`` begins or goes on; ``config`` is its configuration as JSON data."""
        ...

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of an evaluation after ``step`` steps."""
        ...

    def end(self) -> None:
        """The run ends here, finished or not."""
        ...


class TrackioSink:
    """Sends figures to trackio (extra ``track``), which keeps them on this machine."""

    def __init__(self, project: str = "anyformer"):
        try:
            import trackio  # type: ignore[import-not-found]
        except ImportError:
            raise AnyformerError(
                "TrackioSink needs the package trackio; install it with pip install 'anyformer[track]'"
            ) from None
        self.trackio, self.project = trackio, project

    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        with redirect_stdout(sys.stderr):  # it greets
            self.trackio.init(project=self.project, name=name, config=dict(config), resume="allow")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.trackio.log(dict(figures), step=step)

    def end(self) -> None:
        with redirect_stdout(sys.stderr):
            self.trackio.finish()


class Sinks:
    """Several sinks as one. One that fails is named in a warning and hears nothing more: training goes on."""

    def __init__(self, sinks: Iterable[Sink]):
        self.sinks = list(sinks)

    def begin(self, name: str, config: Mapping[str, Any]) -> None:
        self._tell("begin", name, config)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._tell("log", step, figures)

    def end(self) -> None:
        self._tell("end")

    def _tell(self, verb: str, *what: Any) -> None:
        for sink in list(self.sinks):
            try:
                getattr(sink, verb)(*what)
            except Exception as error:
                self.sinks.remove(sink)
                LOG.warning("%s failed (%s) and is left out from here on", type(sink).__name__, error)
