"""The keys optim.* and schedule.*: the optimizer, and the learning rate over the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Union

from ngpt_train.config.keys import AUTO, COUNT, COUNT_OR_0, Conflict, FloatOrAuto, IntOrAuto, Table, key
from ngpt_train.config.sections.lr_table import OPTIMIZERS, found_for, look_up, problem_of
from ngpt_train.config.validate import Origin, keep_later, mistake

if TYPE_CHECKING:
    from ngpt_train.config.model_keys import ModelConfig
    from ngpt_train.config.schema import Config


class MatrixStep(NamedTuple):
    """The step on a matrix of the blocks: optim/matrix_steps.py."""

    direction: str  # adam, muon, normuon
    keeps_norm: bool  # Hyperball


MATRIX_STEPS = {
    "muon": MatrixStep("muon", keeps_norm=False),
    "normuon": MatrixStep("normuon", keeps_norm=False),
    "adamh": MatrixStep("adam", keeps_norm=True),
    "muonh": MatrixStep("muon", keeps_norm=True),
}
OF_MUON = {"momentum": 0.95, "nesterov": True, "adjust_lr": "original"}  # Keller Jordan's, and torch.optim.Muon's


@dataclass
class GroupsConfig:
    """Peak learning rates of their own. The schedule multiplies all rates alike."""

    embedding: Union[float, None] = key(
        None, "Of input embeddings and learned positions; null is optim.lr.", above=0, maximum=1000
    )
    output: Union[float, None] = key(None, "Of the output embedding; null is optim.lr.", above=0, maximum=1000)
    vector: Union[float, None] = key(None, "Of gains, biases, scale vectors; null is optim.lr.", above=0, maximum=1000)

    def chosen(self) -> list[str]:
        """The keys that are set."""
        return [name for name, rate in vars(self).items() if rate is not None]


@dataclass
class RateReferenceConfig:
    """The run in which optim.lr was tuned. optim.lr_rule carries it to others."""

    batch_tokens: Union[int, None] = key(None, "Its tokens a step; null is this run's.", **COUNT)
    n_layers: Union[int, None] = key(None, "Its n_layers; null is this run's.", **COUNT)
    tokens: Union[int, None] = key(None, "Its tokens in all; null is this run's.", minimum=1, maximum=10**15)


@dataclass
class OptimConfig:
    """The optimizer. The recipe of the architecture sets these."""

    may_change: ClassVar = ("lr_table", "lr_source")

    name: str = key(
        "adamw",
        "Optimizer; adam never decays. The others step so on the blocks' matrices alone, and as adamw elsewhere: muon "
        "orthogonalises the momentum; normuon also brings its rows to about one length; adamh and muonh take Adam's "
        "and Muon's direction and keep each matrix's length (Hyperball), so that lr is about the angle of a step.",
        choices=OPTIMIZERS,
    )
    lr: FloatOrAuto = key(
        AUTO, "Peak learning rate; auto looks up lr_table by scale, context and budget.", above=0, maximum=1000
    )
    # {scale: {context: lr or entries}}, which problem_of checks: OmegaConf fails to merge two typed dicts of dicts.
    lr_table: dict[str, Any] = key(
        {},
        "lr by scale, then context, then tokens or steps of the whole run. The longest context within model.context "
        "counts, else the shortest there is; of its entries the one with the nearest budget, by its logarithm.",
        table=Table(problem_of, "{tiny: {256: 0.001}}", "Set optim.lr, or write a recipe in YAML"),
    )
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    lr_source: str = key("", "Where optim.lr is from, which the log says. With lr=auto the entry of lr_table says it.")
    lr_rule: str = key(
        "none",
        "none: optim.lr is the rate. hyperp: the rate of all parameters is optim.lr sqrt(B / B_0) sqrt(L_0 / L) "
        "(T / T_0)^-0.32, with B tokens a step, L layers, T tokens in all, and optim.reference's (arXiv 2603.28743, "
        "where it is MuonH's).",
        choices=("none", "hyperp"),
    )
    reference: RateReferenceConfig = field(default_factory=RateReferenceConfig)
    betas: list[float] = key([0.9, 0.95], "Adam's decay rates of the first and second moment.")
    eps: float = key(1e-8, "Adam's epsilon.", above=0, maximum=1)
    momentum: Union[float, None] = key(
        None, "Decay rate of the averaged gradient of muon, normuon and muonh; null is 0.95.", minimum=0, below=1
    )
    nesterov: Union[bool, None] = key(
        None, "Of muon, normuon and muonh, whether the average is taken one gradient further; null is true."
    )
    adjust_lr: Union[str, None] = key(
        None,
        "Of muon and normuon, the factor of a step on an out x in matrix: original, which null is, has sqrt(max(1, out "
        "/ in)), match_rms_adamw 0.2 sqrt(max(out, in)), with which rates and decay are about AdamW's.",
        choices=("original", "match_rms_adamw"),
    )
    gate_power: Union[float, None] = key(
        None,
        "a of GatedAdamW (second-hand), which multiplies Adam's step by d^a / (d^a + gate_eps^a), with d = sqrt(v) + "
        "eps; 0.5 is the paper's, 1 is Adam with the epsilon eps + gate_eps. null: no gate.",
        above=0,
        maximum=10,
    )
    gate_eps: float = key(1e-8, "The d at which the gate halves a step; the value is ours.", above=0, maximum=1)
    angle_cap: Union[float, None] = key(
        None,
        "Angular step cap (second-hand): the most radians, the same at each step, that a step turns a row of the "
        "blocks' matrices, where rows are on the sphere. null: no cap.",
        minimum=1e-5,  # the rounding of a row, 1e-7, never counts as a turn
        maximum=3.2,
    )
    weight_decay: float = key(
        0.1, "Decoupled weight decay of the matrices; nGPT, adamh and muonh take only 0.", minimum=0, maximum=1000
    )
    z_loss: float = key(
        0.0,
        "Adds this times logsumexp(logits)^2 to a target's loss in training, for example 1e-4, which keeps logits from "
        "drifting; 0: none. The losses of metrics.jsonl and of validations are without it; train records have its "
        "part as z_loss.",
        minimum=0,
        maximum=1000,
    )
    label_smoothing: float = key(
        0.0,
        "Share of a target's label that training spreads evenly over all tokens of the vocabulary, as torch's "
        "cross_entropy does; 0: none. The losses of metrics.jsonl and of validations are without it.",
        minimum=0,
        below=1,
    )
    clip_norm: Union[float, None] = key(
        1.0, "Largest global gradient norm; larger gradients are scaled down to it. null: no clipping.", above=0
    )
    storage: str = key(
        "fp32",
        "How the blocks' matrices and their moments are kept between steps. bf16: rounded after each, as parameters in "
        "bf16 without an fp32 master are, by which public comparisons trained their baseline; it saves no memory here.",
        choices=("fp32", "bf16"),
    )
    ema_decay: Union[float, None] = key(
        None,
        "Keeps a moving average of the weights: after each step ema <- ema_decay ema + (1 - ema_decay) w, for example "
        "0.999. `evaluate` and `generate` use it with evaluate.weights=ema. null: none.",
        above=0,
        below=1,
    )

    def resolve(self, config: Config) -> None:
        """Looks up lr, and where it is from, if it is auto, and replaces null in the keys of Muon. Call when the batch
        is resolved. Raises ConfigError."""
        for name in self._of_muon():
            if getattr(self, name) is None:
                setattr(self, name, OF_MUON[name])
        if self.lr == AUTO:
            self.lr, self.lr_source = self.from_table(config)

    def from_table(self, config: Config) -> tuple[float, str]:
        """The rate of lr_table for a config whose batch is resolved, and where it is from. Raises ConfigError."""
        row = self.row_of(config.scale.name)
        if not row:
            scales = ", ".join(scale for scale in self.lr_table if self.row_of(scale))
            of_optimizer = "" if self.matrix_step is None else f" and optim.name={self.name}"
            others = f", only for {scales}" if scales else ", nor for another scale"
            problem = f"the recipe's table has no learning rate for scale={config.scale.name}{of_optimizer}{others}"
            raise mistake(f"optim.lr=auto: {problem}", "Set optim.lr=NUMBER")
        steps, context = config.train.steps, config.model.context
        tokens = steps * config.train.rows_per_step * context
        return look_up(row, config.model.name, context, {"tokens": tokens, "steps": steps})

    @property
    def matrix_step(self) -> MatrixStep | None:
        """The step on the matrices of blocks; None: Adam's, as on all parameters."""
        return MATRIX_STEPS.get(self.name)

    @property
    def direction(self) -> str:
        """Of a step on the matrices of blocks. It decides which moments a checkpoint has."""
        return "adam" if self.matrix_step is None else self.matrix_step.direction

    def row_of(self, scale: str) -> dict[int, Any]:
        """The contexts and entries of lr_table for this optimizer at `scale`; empty where there are none."""
        return found_for(self.lr_table.get(scale, {}), self.name)

    def conflicts(self, model: ModelConfig) -> Iterator[Conflict]:
        """Keys that exclude each other, and keys without an effect."""
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            yield "optim.betas", "not two numbers >= 0 and < 1", "For example optim.betas=[0.9,0.95]"
        if self.weight_decay and self.name == "adam":
            yield "optim.weight_decay optim.name", "adam never decays", "Set optim.name=adamw or optim.weight_decay=0"
        step = self.matrix_step
        if step is not None and step.keeps_norm:
            if self.weight_decay:
                problem = "a matrix that keeps its length cannot decay"
                yield "optim.weight_decay optim.name", problem, "Set optim.weight_decay=0, or optim.name=adamw or muon"
            if model.init.residual == 0:
                problem = "a matrix that starts at 0 would keep the length 0"
                yield "model.init.residual optim.name", problem, "Set model.init.residual above 0, or optim.name=muon"
        if self.gate_power is not None and self.matrix_step is not None:
            fix = "Set optim.gate_power=null, or optim.name=adam or adamw"
            yield "optim.gate_power optim.name", "the gate is a part of Adam's step", fix
        if self.angle_cap is not None and model.rows != "sphere":
            fix = "Set optim.angle_cap=null, or take model=ngpt with model.constraint=projection"
            blamed = "model.constraint" if hasattr(model, "constraint") else "model.name"
            yield f"optim.angle_cap {blamed}", "the cap is for rows that each step brings back to length 1", fix
        given = [name for name, value in vars(self.reference).items() if value is not None]
        if self.lr_rule == "none" and given:
            fix = "Set optim.lr_rule=hyperp, or leave optim.reference out"
            yield f"optim.reference.{given[0]} optim.lr_rule", "no rule carries the rate", fix
        if self.lr_rule != "none" and not given:
            fix = "Set optim.reference.n_layers, .tokens or .batch_tokens, or optim.lr_rule=none"
            yield "optim.lr_rule", "no run is named from which the rule carries the rate", fix
        for switch, name in self.without_effect():
            if getattr(self, name) != getattr(OptimConfig, name):
                key = f"optim.{name}"
                on = "set optim.gate_power=0.5" if switch == "gate_power" else f"set {key}=null"
                yield f"{key} optim.{switch}", f"{key} has no effect then", f"Leave it out, or {on}"
        for name in ("label_smoothing", "z_loss"):
            if model.n_classes == 1 and getattr(self, name):
                fix = f"Set optim.{name}=0, or name the labels with data.labels"
                yield f"optim.{name}", "labels that are numbers have a squared error, which has no such term", fix
        if self.groups.output is not None and model.tied_embeddings:
            problem = "the output embedding is the input embedding"
            yield "optim.groups.output model.tied_embeddings", problem, "Set optim.groups.embedding instead"

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """(key, key) of optim.*: the value of the first leaves the second without an effect."""
        if self.gate_power is None:
            yield "gate_power", "gate_eps"
        yield from (("name", name) for name in OF_MUON if name not in self._of_muon())

    def _of_muon(self) -> tuple[str, ...]:
        """The keys of OF_MUON with an effect: Hyperball sees no factor."""
        step = self.matrix_step
        if step is None or step.direction == "adam":
            return ()
        return ("momentum", "nesterov") if step.keeps_norm else tuple(OF_MUON)


@dataclass
class ScheduleConfig:
    """Learning rate as a function of the step."""

    may_change: ClassVar = ("warmup_tokens",)  # the steps that it stands for are compared

    kind: str = key(
        "cosine",
        "Shape after the warmup: cosine, linear, wsd (stable, then linear decay), constant, inverse_sqrt (falls as 1 / "
        "sqrt(step), whatever train.steps is; a warmup of 0 counts as 1), ramp (no warmup: grows from 0 to optim.lr "
        "over train.steps, to see at which rate the loss explodes), or log (falls with the logarithm of the progress, "
        "fastest at first; schedule.rho).",
        choices=("cosine", "wsd", "linear", "constant", "inverse_sqrt", "ramp", "log"),
    )
    warmup_steps: IntOrAuto = key(
        AUTO,
        "Linear warmup; auto is min(2000, 10 % of train.steps), of a ramp 0, of log 10 %. One that a file sets is auto "
        "where a train.steps that is set later leaves no room for it.",
        **COUNT_OR_0,
    )
    warmup_tokens: Union[int, None] = key(
        None,
        "Linear warmup in tokens, for example 375000000: rounded up to whole steps, it replaces warmup_steps.",
        minimum=0,
        maximum=1_000_000_000_000_000,
    )
    final_lr: float = key(
        0.0, "Learning rate that cosine, linear, wsd and log end at; the others take only 0.", minimum=0, maximum=1000
    )
    final_share: Union[float, None] = key(
        None, "schedule.final_lr as a share of optim.lr, such as 0.1, to follow a tuned rate.", minimum=0, maximum=1
    )
    decay_fraction: float = key(0.2, "wsd: last part of train.steps that decays.", above=0, maximum=1)
    rho: float = key(
        0.1, "log: the smaller, the faster the first fall; large is linear. The value is ours.", above=0, maximum=1000
    )

    def auto_warmup(self, steps: int) -> int:
        """The warmup that auto stands for in a run of `steps` steps."""
        return {"ramp": 0, "log": steps // 10}.get(self.kind, min(2000, steps // 10))

    def resolve(self, config: Config, origins: Mapping[str, Origin]) -> None:
        """Sets final_lr and warmup_steps. Of final_lr and final_share, and of warmup_steps and warmup_tokens, the one
        that was set last counts. Call when the batch and optim.lr are resolved. Raises ConfigError."""
        train = config.train
        keep_later(config, "schedule.final_lr schedule.final_share", "both set where the schedule ends", origins)
        if self.final_share is not None:
            self.final_lr = self.final_share * float(config.optim.lr)
        names = "schedule.warmup_steps schedule.warmup_tokens"
        keep_later(config, names, "both set the warmup", origins)
        if self.warmup_tokens is not None:
            self.warmup_steps = -(-self.warmup_tokens // (train.rows_per_step * config.model.context))
        # A warmup belongs to the steps it was written for: where fewer were set later, it is auto.
        later = origins["train.steps"].order > max(origins[name].order for name in names.split())
        if self.warmup_steps == AUTO or (later and int(self.warmup_steps) >= train.steps):
            self.warmup_steps, self.warmup_tokens = self.auto_warmup(train.steps), None

    def conflicts(self, config: Config) -> Iterator[Conflict]:
        """Keys that exclude each other. `config` is resolved."""
        train, lr = config.train, config.optim.lr
        if int(self.warmup_steps) >= train.steps:
            problem = "the warmup leaves no step at the full learning rate"
            fix = f"Set schedule.warmup_steps below {train.steps}; auto would be {self.auto_warmup(train.steps)}"
            in_tokens = ""
            if self.warmup_tokens is not None:
                in_tokens, tokens = "schedule.warmup_tokens ", train.rows_per_step * config.model.context
                fix = f"Set schedule.warmup_tokens to {(train.steps - 1) * tokens} or less, a step has {tokens}"
            yield f"{in_tokens}schedule.warmup_steps train.steps", problem, fix
        if self.kind == "ramp" and self.warmup_steps:
            key = "schedule.warmup_steps" if self.warmup_tokens is None else "schedule.warmup_tokens"
            yield f"{key} schedule.kind", "the whole run is a warmup", f"Set {key}=0"
        if self.kind in ("constant", "inverse_sqrt", "ramp") and self.final_lr:
            problem = "this kind falls to no learning rate of one's choice"
            key = "schedule.final_lr" if self.final_share is None else "schedule.final_share"
            yield f"{key} schedule.kind", problem, f"Set {key}=0, or another kind"
        if self.decay_fraction != ScheduleConfig.decay_fraction and self.kind != "wsd":
            fix = "Set schedule.kind=wsd, or leave schedule.decay_fraction out"
            yield "schedule.decay_fraction schedule.kind", "only wsd decays in a last part of the steps", fix
        if self.rho != ScheduleConfig.rho and self.kind != "log":
            fix = "Set schedule.kind=log, or leave schedule.rho out"
            yield "schedule.rho schedule.kind", "only log has a rho", fix
        if self.final_lr > float(lr):
            yield "schedule.final_lr optim.lr", "ends above the peak", f"Set schedule.final_lr to {lr} or less"
