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
    """For each spectral norm in a model: the names of `u`, `v`, and the weight, among the names of its tensors.

    Raises:
        UserError: it divides what another parametrization returns, which cannot be computed from the tensors alone.
    """
    for u_name in weights:
        v_name, name_with_hook = f"{u_name[:-1]}v", f"{u_name[:-2]}_orig"
        if not u_name.endswith("_u") or v_name not in weights:
            continue
        match = _U_OF_PARAMETRIZATION.fullmatch(u_name)
        name = name_with_hook if match is None else f"{match[1]}.original"
        if match is not None and (match[2] != "0" or name not in weights):
            raise UserError(
                f"{match[1]}: its spectral norm follows another parametrization, so it cannot be computed for an "
                "average of the weights",
                cure="Register the spectral norm first, or train without the average.",
            )
        if name in weights and weights[name].numel() == weights[u_name].numel() * weights[v_name].numel():
            yield u_name, v_name, name


def find_spectral_vectors(weights: Mapping[str, Tensor], *, computed: bool = True) -> dict[str, Tensor]:
    """The vectors `u` and `v` of each spectral norm by name, computed for these weights, from the present vectors on.

    Collective, if weights are sharded.

    Args:
        computed: False: return the present vectors themselves.

    Raises:
        UserError: as in `_find_spectral_norms`.
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

    Its rows are a dimension of the weight, which the state does not tell. If several dimensions have the size of `u`,
    the one is chosen for which the vectors give the largest singular value.
    """
    matrices = [weight.movedim(dim, 0).flatten(1) for dim in range(weight.ndim) if weight.shape[dim] == len(u)]
    if len(matrices) == 1:
        return matrices[0]
    return max(matrices, key=lambda matrix: float(torch.vdot(u, matrix @ v).abs()))
