"""What each command takes: one frozen dataclass a command, whose docstrings are its help (``train``: :mod:`anyformer.train_options`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

AsJson = Annotated[bool, arg(name="json", help="print one JSON object and nothing else")]
Output = Annotated[Path, arg(aliases=["-o"])]


@dataclass(frozen=True)
class Demo:
    """Train two small targets, compile both into programs for one fixed 0/1 machine, swap them, and check that nothing else changed.

    Example: anyformer demo
    """

    output: Output = Path("demo")
    """Folder for targets, programs and overview.png."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Compile:
    """Compile a target's folder into a program: the input embedding of a fixed machine.

    Example: anyformer compile demo/targets/dyck --backbone looped -o dyck-looped
    """

    target: Annotated[Positional[Path], arg(metavar="TARGET")]
    """Folder of a target (config.json, model.safetensors): of ours, or a Hugging Face model's."""
    output: Output
    """Folder for the program."""
    backbone: str = "path-tree"
    """Which machine: path-tree, looped, chain, composition, random, stored-program, sequence-simulator (attention, residual or not), or
    (attention alone) frozen-masked or frozen-random, on which programs are learned."""
    seed: int | None = None
    """Random backbones: the seed (default 0)."""
    width: int | None = None
    """Frozen-random backbone: its width (default: the required reads)."""
    oversample: float | None = None
    """Random backbone: width / required reads (default 1.25)."""
    law: Literal["uniform", "gaussian"] | None = None
    """Random backbone: law of the weights (default uniform)."""
    composition_tolerance: float | None = None
    """Composition backbone: products up to this relative size count as zero (default 0: exact; above, the program is an approximation)."""
    dtype: Literal["float32", "float64"] | None = None
    """dtype of the program (default: the target's)."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Run:
    """Run a program on its machine.

    Example: anyformer run demo/programs/dyck --tokens "( ( ) ) ?"
    """

    program: Annotated[Positional[Path], arg(metavar="PROGRAM")]
    """Folder of a program."""
    tokens: str
    """Token names (or ids, where the program has no names), separated by spaces."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Generate:
    """Continue some tokens greedily, with a cache of keys and values where the class allows it.

    Example: anyformer generate llama-program --tokens "1 17 18 17 19" --new-tokens 8
    """

    program: Annotated[Positional[Path], arg(metavar="PROGRAM")]
    """Folder of a program."""
    tokens: str
    """Token names (or ids, where the program has no names), separated by spaces."""
    new_tokens: int = 16
    """How many tokens to append at most."""
    end: str | None = None
    """Stop after this token."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Verify:
    """Compare a program with its target's own forward: outputs and every attention pattern. Exit code 1 if they differ.

    Example: anyformer verify demo/programs/dyck demo/targets/dyck
    """

    program: Annotated[Positional[Path], arg(metavar="PROGRAM")]
    """Folder of a program."""
    target: Annotated[Positional[Path], arg(metavar="TARGET")]
    """Folder of its target, of ours or a Hugging Face model's."""
    sequences: int = 8
    """Random sequences of each length."""
    length: int = 32
    """Longest random sequence."""
    dtype: Literal["float32", "float64"] | None = None
    """dtype to compare in (default: the program's)."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Specialize:
    """Turn a program back into an ordinary transformer, from the program alone, and write it as a folder.

    Example: anyformer specialize demo/programs/dyck -o demo/dyck-again
    """

    program: Annotated[Positional[Path], arg(metavar="PROGRAM")]
    """Folder of a program."""
    output: Output
    """Folder for the transformer."""
    to: Literal["anyformer", "huggingface"] = "anyformer"
    """As a target of ours, or as a Hugging Face model (Llama-like classes)."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Inspect:
    """Say what a program is: class, sizes, and the meaning of each block of coordinates.

    Example: anyformer inspect demo/programs/dyck
    """

    program: Annotated[Positional[Path], arg(metavar="PROGRAM")]
    """Folder of a program."""
    as_json: AsJson = False


@dataclass(frozen=True)
class CostCommand:
    """Width and memory of every machine for a class of targets, and the lower bound. Nothing is built, however large.

    Example: anyformer cost --heads 2 --layers 4 --head-dim 30 --features 30
    """

    heads: int
    """H, attention heads a layer."""
    layers: int
    """L."""
    head_dim: int
    """d, width of a head's queries and keys."""
    features: int
    """D (d_in of the paper), width of the target's stream."""
    vocab: int | None = None
    """Vocabulary of a read-out; without one a leaf is as wide as the features."""
    residual: bool = False
    """With residual connections."""
    norm: Literal["none", "rms", "layer"] = "none"
    """Normalisation: RMSNorm, LayerNorm or none."""
    norm_position: Literal["pre", "post"] = "pre"
    """Before or after each part."""
    mlp: int = 0
    """Hidden units of the MLP (0: none)."""
    gated: bool = False
    """Gated units (SwiGLU and the like)."""
    bias: bool = False
    """With biases (behind a norm they cost columns)."""
    length: int = 1
    """Sequence length for state = width x length."""
    chart: Path | None = None
    """Draw state and non-zero weights of every machine against L, H and d into this file (.png, .pdf, .svg)."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Tasks:
    """Every task: vocabulary, length, and what predictors reach that understand nothing, in per cent (docs/tasks.md).

    Example: anyformer tasks
    """

    file: Path | None = None
    """Also language modelling on this file."""
    rows: int = 20_000
    """Rows to fit the predictors on, and as many to score them on; finite tasks are taken whole."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Reproduce:
    """A table or figure of one of the papers, with our numbers: writes TABLE.json, TABLE.md and a figure.

    Example: anyformer reproduce table1 --seeds 0 1 2
    """

    table: Annotated[
        Positional[
            Literal["table1", "table2", "learnability", "bfloat16", "rasp", "simulator", "universality", "universality-training"]
        ],
        arg(metavar="TABLE"),
    ]
    """table1: five tasks, without and with residual & norm; table2: the ablation; learnability: which choice lets attention-only
    programs be learned (1-hop at the paper's size, whatever the profile); bfloat16: what rounded products do to a learning curve;
    rasp: random programs, compiled against interpreted (quick: 500, paper: 10,000); simulator: error and size of the universal simulator
    of attention; universality: which attention is universal, claims and verdicts (minutes); universality-training: certified and
    impossible stacks trained on one target."""
    profile: Literal["quick", "paper"] = "quick"
    """quick: small models, 200 steps, no claim about the paper's figures; paper: its H, L, d and m (hours)."""
    seeds: tuple[int, ...] = (0,)
    """One run a cell and seed."""
    only: tuple[str, ...] | None = None
    """Only these cells, task:variant:model with * for any (2-hop:none:*); the others keep what TABLE.json has."""
    engine: Literal["local", "ray"] = "local"
    """A process a core of this machine, or a Ray cluster."""
    runs: Path = Path("runs")
    """Folder of the run folders: what is finished there is not trained again, what is not goes on."""
    output: Output = Path("results")
    """Folder for the table."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Certify:
    """Is this attention a universal approximator of G-equivariant maps (continuous, on compact sets, in L^p), and how is that known? Exit code 1
    unless the answer is yes.

    Example: anyformer certify softmax --tokens 5 --dim 2 --layers 1 --group symmetric
    """

    subject: Annotated[Positional[str], arg(metavar="SUBJECT")]
    """A family (softmax, causal-softmax, rbf, performer, linear-relu, linformer, skyformer, longformer, bigbird, mean-pooling, fnet, cyclic,
    dihedral, ...), or module:Class of a PyTorch module (batch, n, d) -> (batch, n, d), whose code is then imported and run."""
    tokens: int
    """n, fixed."""
    dim: int
    """d, features of a token."""
    layers: int = 1
    """m, attention layers at most; feed-forward layers are free."""
    group: str = "auto"
    """G: symmetric, trivial, cyclic, dihedral, reflection, causal (all causal maps), auto (the smallest that can be claimed), or generators as
    JSON: [[1,0,2]] with the image of each position."""
    kwargs: str = "{}"
    """Arguments of module:Class, as one JSON object."""
    activation: str = "relu"
    """Of the feed-forward layers between."""
    bits: int = 128
    """Precision of ball arithmetic."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Limits:
    """What a fixed machine cannot do and what it needs: the lower bound, widths below N, LayerNorm, random weights (docs/limits.md).

    Example: anyformer limits --quick
    """

    output: Output = Path("limits")
    """Folder for limits.json and three figures."""
    quick: bool = False
    """A few seconds: few seeds, few widths, small sizes."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Rasp:
    """Run a program in the .rasp language on an input; without a FILE there is a prompt (docs/rasp-files.md).

    Example: anyformer rasp examples/reverse.rasp --input hello
    """

    file: Annotated[Positional[Path | None], arg(metavar="[FILE]")] = None
    """The program."""
    input: str | None = None
    """Tokens: numbers (or True and False) that commas separate (3,1,2; one number: 7,; a negative one first: --input=-1,2), else every
    character is a token. Default: the example that the program sets, or hello."""
    name: str | None = None
    """The expression to show, any of the language; default: the last sequence or selector that the program evaluates or assigns."""
    compiled: bool = False
    """Also compile it to a transformer, for the tokens of the input and up to its length, and run that."""
    vocab: str | None = None
    """Compiled: the tokens it must know (0,1,2 or abc; reals:-10,10 for all numbers between; default: those of the input)."""
    max_length: int | None = None
    """Compiled: the longest input (default: this one)."""
    mode: Literal["analytic", "standard"] = "analytic"
    """Compiled: exp, 1/x, .. as units with that function, or as tables of ReLU units with a stated bound."""
    as_json: AsJson = False


@dataclass(frozen=True)
class Simulate:
    """A random attention layer on the universal simulator: one fixed network whose input describes the layer (docs/simulator.md).

    Example: anyformer simulate --n 5 --d 4 --dv 3 --heads 2
    """

    n: int = 5
    """Tokens of the layer."""
    d: int = 4
    """Features of the layer's input."""
    dv: int = 3
    """Features of its output."""
    heads: int = 2
    """Its heads (their outputs are added)."""
    version: Literal["compact", "paper", "soft"] = "compact"
    """compact: 4 layers, average-hard; soft: 3 layers, the last one softmax; paper: the paper's construction."""
    causal: bool = False
    """Whether the layer is causal."""
    scaled: bool = False
    """Whether its scores are divided by sqrt(d)."""
    mode: Literal["analytic", "standard"] = "analytic"
    """exp and 1/x as units with that function, or as tables of ReLU units with a stated bound."""
    tolerance: float = 1e-6
    """Standard mode: the largest error of one table."""
    dtype: Literal["float64", "float32"] = "float64"
    """dtype of the simulator."""
    scale: float = 0.5
    """Standard deviation of the random layer's numbers."""
    seed: int = 0
    """Which random layer."""
    as_json: AsJson = False
