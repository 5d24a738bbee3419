"""The equations of the matrix optimizers: Muon, NorMuon and Hyperball, for one matrix W, `(out, in)`, with gradient G.

A direction u

    adam       u = m_hat / (sqrt(v_hat) + eps)                    Adam's moments
    muon       B <- mu B + (1 - mu) G                             Muon (Keller Jordan 2024)
               u = NS((1 - mu) G + mu B); without Nesterov NS(B)
    normuon    Muon's u, each row over its running quadratic mean NorMuon (arXiv 2510.05491)

and a placement:

    free       W <- (1 - lr lambda) W - lr s u                    s: `adjustment`
    ball       W <- R Norm(W - lr R Norm(u)),  R = |W|_F          Hyperball (arXiv 2606.16899)

MATRIX_STEPS in config/sections/optim.py has the direction and the placement of each optim.name.

torch.optim.Muon documents B <- mu B + G and computes the form above. Both have one direction, and NS sees no length.
"""

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, and torch.optim.Muon's
ITERATIONS = 5
SHORTEST = 1e-7  # no divisor is smaller
BETA_NEURONS = 0.95  # of NorMuon's running mean squares


def orthogonalised(x: Tensor) -> Tensor:
    """NS(x), about U V^T of x = U S V^T, for k matrices: `(k, m, n)` -> the same shape and dtype. NS(x^T) = NS(x)^T.

    X <- x / |x|_F, then five times X <- P X with P = a I + b A + c A^2 and A = X X^T, on the shorter side. Singular
    values from 0.003 |x|_F on become 0.68 to 1.21. Smaller ones grow by up to a^5 = 485.
    """
    m, n = x.shape[1:]
    X = x if m <= n else x.mT
    X = X / _lengths(X)
    # The squares of a long matrix's singular values need more digits than bf16 has.
    long = max(m, n) >= 2 * min(m, n) and X.dtype != torch.bfloat16
    X = _by_squares(X) if long else _by_products(X)
    return X if m <= n else X.mT


def _by_products(X: Tensor) -> Tensor:
    a = COEFFICIENTS[0]
    for _ in range(ITERATIONS):
        X = torch.baddbmm(X, _polynomial(X @ X.mT), X, beta=a)
    return X


def _by_squares(X: Tensor) -> Tensor:
    """The same with products of m x m alone: A <- P A P, which is the next X X^T, and the product Q of all P."""
    a = COEFFICIENTS[0]
    A = X @ X.mT
    P = _polynomial(A)
    Q = P.clone()
    Q.diagonal(dim1=1, dim2=2).add_(a)
    for _ in range(ITERATIONS - 1):
        AP = torch.baddbmm(A, A, P, beta=a)
        A = torch.baddbmm(AP, AP, P, beta=a)
        P = _polynomial(A)
        Q = torch.baddbmm(Q, P, Q, beta=a)
    return Q @ X


def _polynomial(A: Tensor) -> Tensor:
    """P - a I = b A + c A^2."""
    _, b, c = COEFFICIENTS
    return torch.baddbmm(A, A, A, beta=b, alpha=c)


def adam_direction(m: Tensor, v: Tensor, t: Tensor, beta1: float, beta2: float, eps: float) -> Tensor:
    """m_hat / (sqrt(v_hat) + eps) of the moments m and v after t steps, t 0-dim."""
    t = t.double()  # in fp32, 1 - beta2^t would be off by 5e-5 at the first step
    return (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)


def one_length_per_neuron(u: Tensor, mean_square: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """NorMuon's direction, with |u|_F as it was, and the new running mean square of each neuron.

    u `(k, out, in)`, or its matrices' transposes; inputs: the dimension of u that is `in`. mean_square: 1 long there.
    A neuron is an output of W, as in the paper; public codes take the columns of a wide W. There is no bias correction:
    after the first step all neurons have one length.
    """
    mean_square = torch.lerp(mean_square, u.square().mean(inputs, keepdim=True), 1 - BETA_NEURONS)
    even = u / mean_square.clamp(min=1e-10).sqrt()
    return even * (torch.linalg.vector_norm(u, dim=(1, 2), keepdim=True) / _lengths(even)), mean_square


def _lengths(x: Tensor) -> Tensor:
    """|x|_F of each matrix, to divide by: `(k, m, n)` -> `(k, 1, 1)`."""
    return torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=SHORTEST)


def adjustment(rule: str, n_out: int, n_in: int) -> float:
    """s of optim.adjust_lr: original is Keller Jordan's, match_rms_adamw Moonshot's (arXiv 2502.16982)."""
    return math.sqrt(max(1, n_out / n_in)) if rule == "original" else 0.2 * math.sqrt(max(n_out, n_in))


def ball_factors(products: Tensor, lr: float) -> Tensor:
    """keep and move of W <- keep W - move u, `(n, 2)` fp64, which is Hyperball's step of n matrices.

    products `(n, 3)` fp64: |W|^2, <W, u> and |u|^2. Where u is 0, W stays. The step is lr R long before W is brought
    back to R. R is the length before the step, which the earlier steps kept to rounding.
    """
    w_w, w_u, u_u = products.unbind(-1)
    R, length = w_w.sqrt(), u_u.sqrt()
    eta, tiny = lr * (u_u > 0).double(), torch.finfo(torch.float64).tiny
    cosine = w_u / (R * length).clamp(min=tiny)
    keep = (1 - 2 * eta * cosine + eta.square()).rsqrt()  # R / |W - eta R Norm(u)|
    return torch.stack([keep, keep * eta * R / length.clamp(min=tiny)], dim=-1)
