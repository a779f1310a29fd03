"""Spectral norms of torch.nn.utils, in both of its styles: the vectors of their power iteration for given weights.

Each divides a weight by its largest singular value, which two buffers, `u` and `v`, give. Both follow the weight in
training. An average of weights has other singular vectors, and a mean of unit vectors is no unit vector, so the vectors
of an average are computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import normalize

from trainer_cli.dtensor import whole_of
from trainer_cli.errors import UserError

_ITERATIONS = 15
"""As torch makes when it registers a spectral norm; here the vectors of the trained weight are a better start."""
_U_OF_PARAMETRIZATION = re.compile(r"(.*\bparametrizations\.[^.]+)\.(\d+)\._u")


def _find_spectral_norms(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, str, str]]:
    """For each spectral norm among a model's tensors: the names of `u`, of `v`, and of the weight that it divides.

    Raises:
        UserError: it divides what another parametrization returns, which cannot be computed from the tensors alone.
    """
    for u in weights:
        v, hooked = f"{u[:-1]}v", f"{u[:-2]}_orig"
        if not u.endswith("_u") or v not in weights:
            continue
        match = _U_OF_PARAMETRIZATION.fullmatch(u)
        name = hooked if match is None else f"{match[1]}.original"
        if match is not None and (match[2] != "0" or name not in weights):
            raise UserError(
                f"{match[1]}: its spectral norm follows another parametrization, so it cannot be computed for an "
                "average of the weights",
                cure="Register the spectral norm first, or train without the average.",
            )
        if name in weights and weights[name].numel() == weights[u].numel() * weights[v].numel():
            yield u, v, name


def find_spectral_vectors(weights: Mapping[str, Tensor], *, computed: bool = True) -> dict[str, Tensor]:
    """The vectors `u` and `v` of each spectral norm by name, computed for these weights from those that are there.

    Collective, if weights are sharded.

    Args:
        computed: False: the vectors themselves that are there.

    Raises:
        UserError: one divides what another parametrization returns, which cannot be computed from the tensors alone.
    """
    if not computed:
        return {name: weights[name] for u, v, _ in _find_spectral_norms(weights) for name in (u, v)}
    vectors: dict[str, Tensor] = {}
    with torch.no_grad():
        for u_name, v_name, name in _find_spectral_norms(weights):
            dtype = torch.promote_types(weights[u_name].dtype, torch.float32)
            u, v = weights[u_name].to(dtype), weights[v_name].to(dtype)
            matrix = _matrix_of(whole_of(weights[name]).to(dtype), u, v)
            for _ in range(_ITERATIONS):
                v = normalize(torch.mv(matrix.mH, u), dim=0)
                u = normalize(torch.mv(matrix, v), dim=0)
            vectors |= {u_name: u.to(weights[u_name].dtype), v_name: v.to(weights[v_name].dtype)}
    return vectors


def _matrix_of(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The weight as the matrix whose singular vectors these are.

    Its rows are those of the dimension that the spectral norm was made with, which is in no name. If several have the
    right size, it is the one with which the vectors give the largest value.
    """
    matrices = [weight.movedim(dim, 0).flatten(1) for dim in range(weight.ndim) if weight.shape[dim] == len(u)]
    return (
        matrices[0] if len(matrices) == 1 else max(matrices, key=lambda matrix: float(torch.vdot(u, matrix @ v).abs()))
    )
