"""A rate that was tuned in one run, carried to a run of another batch, depth and length."""

from ngpt_train.config.schema import Config


def hyperp(batch: float, depth: float, horizon: float) -> float:
    """HyperP's factor of the rate (arXiv 2603.28743), which its authors use with MuonH: sqrt(B) L^(-1/2) T^(-0.32).

    batch, depth and horizon: B tokens a step, L layers and T tokens in all, each relative to the reference's. Width has
    no part in it. The authors measured the exponent 0.558 for B.
    """
    return batch**0.5 * depth**-0.5 * horizon**-0.32


def factor_of_rule(config: Config) -> float:
    """The rate of all parameters / optim.lr, by optim.lr_rule; `config` is resolved. A size that optim.reference lacks
    counts as the run's."""
    if config.optim.lr_rule == "none":
        return 1.0
    reference, depth = config.optim.reference, config.model.n_layers
    batch = config.train.rows_per_step * config.model.context
    tokens = batch * config.train.steps
    of_batch, of_depth = batch / (reference.batch_tokens or batch), depth / (reference.n_layers or depth)
    return hyperp(of_batch, of_depth, tokens / (reference.tokens or tokens))
